"""Weights between HF folders and Megatron checkpoints: the same as `megarl convert`, for those who look among the tools."""

from __future__ import annotations

import sys

from megarl.command_line import main

if __name__ == "__main__":
    sys.argv[1:1] = ["convert"]
    main()
