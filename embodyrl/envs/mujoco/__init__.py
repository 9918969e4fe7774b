"""Code that the simulators on MuJoCo share."""
