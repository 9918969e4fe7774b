"""Dataset aggregation (DAgger, Ross et al. 2011)."""
