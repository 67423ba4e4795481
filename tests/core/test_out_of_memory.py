"""What the kernel counts, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.core.out_of_memory import OutOfMemory, device_memory_advice, kills


def test_kills_since_the_run_began_are_told(tmp_path: Path) -> None:
    counts = tmp_path / "vmstat"
    counts.write_text("nr_free_pages 7\noom_kill 3\n")
    watch = OutOfMemory(counts)
    assert watch.told() == ""
    counts.write_text("oom_kill 4\n")
    assert watch.told().startswith("The kernel's out-of-memory killer has ended 1 process here")
    counts.write_text("oom_kill 6\n")
    assert "has ended 3 processes here" in watch.told() and "GB are free" in watch.told()


def test_a_kernel_that_does_not_count_says_nothing(tmp_path: Path) -> None:
    assert kills(tmp_path / "none") == 0 and OutOfMemory(tmp_path / "none").told() == ""
    assert kills() >= 0


def test_a_full_device_is_told_from_other_errors() -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    for error in (full, RuntimeError(f"a task failed: {full}"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")):
        advice = device_memory_advice(error)
        assert "actor.micro_batch_tokens" in advice and "megarl plan" in advice and advice.endswith("\n")
    assert device_memory_advice(RuntimeError("CUDA error: an illegal memory access was encountered")) == ""
