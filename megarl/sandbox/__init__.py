"""Runs code that a model wrote, shut in by the kernel: nothing of this machine is read, nothing is left. Imports `core` alone."""
