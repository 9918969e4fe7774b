"""Implicit Q-learning (Kostrikov et al. 2021)."""
