"""What the simulators on MuJoCo share."""
