"""What a process has freed: it is counted, stays where it is little, and goes back where it is much or memory is scarce."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.core import heap
from megarl.core.platform import get_platform

MIB = 2**20
# In a process of its own: what others have freed in it before would be counted, too.
FREES = """
import json
from megarl.core import heap
from megarl.core.platform import get_platform, held_bytes, return_free_memory

cpu = get_platform("cpu")
before = heap.freed_bytes()
pieces = [b"x" * 2**16 for _ in range(1024)]
last = b"x" * 2**16  # above them: the heap does not shrink
del pieces
freed, held = heap.freed_bytes() - before, [held_bytes(cpu)]
for but_little in (True, False):
    return_free_memory(cpu, but_little=but_little)
    held.append(held_bytes(cpu))
print(json.dumps([freed, *held]))
"""


def test_what_was_freed_is_counted_and_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FREES],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **get_platform("cpu").env},
    )
    freed, held, with_little, without = json.loads(done.stdout)
    assert freed > 60 * MIB
    assert with_little > held - 8 * MIB, "little stays"
    assert without < held - 60 * MIB


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
