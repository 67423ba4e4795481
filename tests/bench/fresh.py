"""What fresh processes say of themselves, in a module that loads nothing: each of them imports it."""

from __future__ import annotations

import os


def facts() -> tuple[int, str]:
    """torch's threads, and those that it was told of."""
    import torch

    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def rank_facts(rank: int, text: str) -> tuple[str, int, int]:
    return f"{text}{rank}", os.getpid(), facts()[0]
