"""Run by `alone.py`: in deterministic mode a row draws its token whatever the other rows of its batch ask for."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from megarl.serving.sglang_cpu import draw_by_row

ALL = 1 << 30  # SGLang's top_k of who asks for none
KINDS = ((ALL, 1.0), (1, 1.0), (5, 1.0), (ALL, 0.6), (ALL, 1.0))  # top_k, top_p; those of top_k 1 are greedy


def main() -> None:
    """Raises AssertionError where a row draws another token beside others than among its like."""
    sampler: Any = importlib.import_module("sglang.srt.layers.sampler")
    # A deterministic server compiles nothing; this process was loaded as the others are.
    sampler.multinomial_with_seed = sampler.multinomial_with_seed.__wrapped__
    draw_by_row()
    probs = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    seeds, positions = torch.arange(40) * 10**15, torch.arange(40) % 7
    top_ks, top_ps = (torch.tensor(each).repeat(8) for each in zip(*KINDS, strict=True))

    def filtered(rows: Tensor) -> Tensor:
        return sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            *(probs[rows].clone(), top_ks[rows], top_ps[rows], 0 * top_ps[rows], False, seeds[rows], positions[rows]),
            return_filtered_probs=False,  # as SGLang says it
        )

    every = torch.arange(40)
    together = filtered(every)
    for kind in set(KINDS):
        alike = every[(top_ks == kind[0]) & (top_ps == torch.tensor(kind[1]))]
        among = filtered(alike)
        if kind == (ALL, 1.0):
            among = sampler.sampling_from_probs_torch(probs[alike], seeds[alike], positions[alike])
        if kind[0] == 1:
            among = probs[alike].argmax(-1)
        assert together[alike].tolist() == among.tolist(), kind
