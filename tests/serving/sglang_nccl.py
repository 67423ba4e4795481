"""Run by `alone.py`: ranks of a server on CPUs look for no NCCL, also where torch has it."""

from __future__ import annotations

import ctypes
from unittest.mock import patch


def main() -> None:
    """Raises AssertionError where SGLang loads a library of NCCL's."""
    import torch
    from sglang.srt.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    torch.version.cuda = "13.0"
    with patch.object(ctypes, "CDLL") as load:
        try:
            NCCLLibrary()
        except ValueError as error:
            assert "no NCCL" in str(error), error
    load.assert_not_called()
