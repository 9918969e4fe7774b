"""Soft actor-critic over the noise of a frozen flow policy (DSRL, Wagenmakers et al. 2025)."""
