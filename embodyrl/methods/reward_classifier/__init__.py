"""A classifier of success, learned from demonstrations, as a reward for other methods."""
