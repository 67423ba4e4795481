"""Without a GPU it refuses; with absent parts it says which, and does not try what cannot work without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import gpu_check

ROOT = Path(__file__).parents[2]


def test_without_a_gpu_it_refuses_with_exit_code_2() -> None:
    done = subprocess.run(
        ["make", "gpu-check", f"GPU_PYTHON={sys.executable}"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "needs an NVIDIA GPU" in done.stdout


def test_a_part_that_does_not_load_is_absent_and_its_cost_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"there": ("print(1.5)", "x"), "gone": ("import no_such_module", "no rollout")}
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    there, gone = (gpu_check.look_at_part(name) for name in parts)
    assert (there.verdict, there.detail) == ("works", "1.5")
    assert gone.verdict == "absent" and "No module named 'no_such_module'; no rollout" in gone.detail


def test_what_needs_an_absent_part_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a CPU's torch and no kernels."""

    def absent(name: str) -> gpu_check.Row:
        return gpu_check.Row(name, "works" if name == "Transformer Engine" else "absent", "")

    monkeypatch.setattr(gpu_check, "look_at_part", absent)
    tests, end_to_end = gpu_check.check()[-2:]
    assert (tests.verdict, tests.detail) == ("not run", "needs torch.cuda")
    assert (end_to_end.verdict, end_to_end.detail) == ("not run", "needs torch.cuda and SGLang's kernels")
