"""Several runs of one config, with other settings or seeds: each is a process of its own, and they share a machine."""
