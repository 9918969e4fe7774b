"""Collecting experience: observations to the policy, chunks of actions to the simulators, trajectories to the
learner."""
