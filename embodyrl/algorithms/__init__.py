"""Pure functions of reinforcement learning: tensors in, tensors out, no config objects, no input or output."""
