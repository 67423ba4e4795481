"""The Megatron engine: steps, log-probs, checkpoints, on one rank."""
