"""Flow policy optimisation (McAllister et al. 2025)."""
