"""HF configs and checkpoints on one side, Megatron models on the other, and the one mapping between them."""
