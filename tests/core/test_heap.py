"""What a process has freed: it is counted, stays where it is little, and goes back where it is much or memory is scarce."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.core import heap
from megarl.core.platform import get_platform, held_bytes, return_free_memory

MIB = 2**20
CPU = get_platform("cpu")


@pytest.fixture
def freed() -> int:
    """Frees 64 MiB in pieces that the C library keeps; how many it says to have beyond what it had."""
    return_free_memory(CPU)
    before = heap.freed_bytes()
    pieces = [torch.zeros(16 * 1024) for _ in range(1024)]
    last = torch.zeros(16 * 1024)  # above them: the heap does not shrink
    del pieces
    assert before is not None and last.numel()
    now = heap.freed_bytes()
    assert now is not None
    return now - before


def test_what_was_freed_is_counted_and_given_back(freed: int) -> None:
    assert freed > 48 * MIB  # some of it was there before
    held = held_bytes(CPU)
    return_free_memory(CPU, but_little=True)
    assert held_bytes(CPU) > held - 8 * MIB, "little stays"
    return_free_memory(CPU)
    assert held_bytes(CPU) < held - 48 * MIB


@pytest.mark.parametrize(
    ("freed_bytes", "available", "little"),
    [
        (0, 0, True),
        (2 * 1024 * MIB, 8 * 1024 * MIB, True),
        (2 * 1024 * MIB + 1, 64 * 1024 * MIB, False),
        (512 * MIB, 2 * 1024 * MIB - 4, False),
        (None, 64 * 1024 * MIB, False),
    ],
)
def test_what_is_little(monkeypatch: pytest.MonkeyPatch, freed_bytes: int | None, available: int, little: bool) -> None:
    monkeypatch.setattr(heap, "freed_bytes", lambda: freed_bytes)
    monkeypatch.setattr(heap.psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    assert heap.is_little_freed() is little


def test_another_c_library_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def library(_: Any) -> object:
        return object()

    monkeypatch.setattr(heap.ctypes, "CDLL", library)
    heap.trim()
    assert heap.freed_bytes() is None
