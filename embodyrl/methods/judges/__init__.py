"""Methods that learn a small network from demonstrations, which judges observations for a reward of other methods."""
