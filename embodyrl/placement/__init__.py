"""Where processes live: a plan of workers, and launchers that run them."""
