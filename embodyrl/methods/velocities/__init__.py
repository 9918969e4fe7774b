"""What methods share that learn from the velocities of a flow policy in place of log-probs."""
