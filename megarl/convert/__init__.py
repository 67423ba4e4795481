"""Weights between HF folders and Megatron checkpoints of any layout, and what a checkpoint holds. Without Ray, on CPU."""
