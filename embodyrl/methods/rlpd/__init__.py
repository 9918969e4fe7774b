"""Soft actor-critic with demonstrations in every minibatch (RLPD, Ball et al. 2023)."""
