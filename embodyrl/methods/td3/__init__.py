"""Twin delayed deterministic policy gradient (TD3, Fujimoto et al. 2018); with demonstrations TD3+BC."""
