"""Places of processes: a plan of workers, and launchers that run them."""
