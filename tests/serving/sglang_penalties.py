"""Run by `alone.py`: a repetition penalty is what its paper says, and nothing is compiled for it."""

from __future__ import annotations

import importlib
import sys

import torch


def main() -> None:
    """Raises AssertionError where it is another, or where torch's compiler was loaded."""
    penalty = importlib.import_module("sglang.srt.sampling.penaltylib.repetition_penalty")
    logits = torch.tensor([[3.0, -2.0, 0.0, 5.0], [1.0, -1.0, 4.0, -8.0]])
    # CTRL (Keskar et al., 2019) divides by it; of those below 0 it would make more, so that they are multiplied.
    penalty.apply_scaling_penalties(logits, torch.tensor([[2.0, 2.0, 2.0, 1.0], [1.0, 1.0, 0.5, 0.5]]))
    assert logits.tolist() == [[1.5, -4.0, 0.0, 5.0], [1.0, -1.0, 8.0, -4.0]], logits
    assert "torch._dynamo" not in sys.modules
