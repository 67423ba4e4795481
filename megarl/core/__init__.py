"""Types, platform, errors and metrics that every room may import. No ray, no megatron, no sglang."""
