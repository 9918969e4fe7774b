"""Q-chunking with a policy of one step, distilled from a flow policy (Li et al. 2025, Park et al. 2025)."""
