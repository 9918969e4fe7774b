"""Ways between processes: shared memory, pipes and doorbells on a machine, lines between machines."""
