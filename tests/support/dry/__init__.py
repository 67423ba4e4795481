"""A whole run in one process, without Ray, servers or Megatron: what a recipe makes the run do, written down."""
