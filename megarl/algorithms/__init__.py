"""Pure functions of reinforcement learning: tensors in, tensors out. No config object, no process group, no I/O."""
