"""Soft actor-critic (Haarnoja et al. 2018)."""
