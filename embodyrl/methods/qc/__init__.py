"""Q-chunking: a flow policy that imitates, and critics that choose among its chunks (Li et al. 2025)."""
