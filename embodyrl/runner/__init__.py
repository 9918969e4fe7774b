"""A run: the iteration loop, evaluation, checkpoints, signals, the run directory."""
