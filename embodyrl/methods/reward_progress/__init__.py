"""A predictor of progress, learned from successful demonstrations, as a reward for other methods."""
