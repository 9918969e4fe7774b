"""CrossQ (Bhatt et al. 2024)."""
