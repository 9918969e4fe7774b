"""The engine that holds one set of weights for rollout and training."""
