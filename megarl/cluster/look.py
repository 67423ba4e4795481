"""What a process is at that somebody waits for in vain: its stacks, and a rank's last collectives, on whatever node it is."""

from __future__ import annotations

import time
from pathlib import Path

from megarl.cluster.nodes import Nodes
from megarl.cluster.process import STACK_SIGNAL, ProcessFacts, ProcessSpec
from megarl.core.log_tail import last_lines
from megarl.training.collectives import ASK_SIGNAL

STACK_WAIT_S = 2.0
STACK_LINES = 60


def stacks_of(spec: ProcessSpec, facts: ProcessFacts, nodes: Nodes) -> str:
    """All stacks of a process, on whatever node it is: as its own fault handler writes them, or read from outside."""
    if not facts.pid:
        return "(no stack: the process has not said yet which one it is; it may still be starting)"
    before = spec.stack.stat().st_size if spec.stack.exists() else 0
    if trouble := nodes.signal(facts.address, facts.pid, STACK_SIGNAL):
        return f"({trouble})"
    end = time.monotonic() + STACK_WAIT_S
    size = before
    while time.monotonic() < end:
        # The handler writes in several pieces: the dump is whole once it stopped growing.
        time.sleep(0.1)
        grown = spec.stack.stat().st_size if spec.stack.exists() else 0
        if grown == size and grown > before:
            return last_lines(spec.stack, STACK_LINES)
        size = grown
    if size > before:
        return last_lines(spec.stack, STACK_LINES)
    outside = nodes.foreign_stack(facts.address, facts.pid)
    return f"(its own handler did not answer within {STACK_WAIT_S:g} s)\n{outside}"


def collectives_of(spec: ProcessSpec, facts: ProcessFacts, nodes: Nodes) -> str:
    """The last collectives of a rank; nothing of a process that tells of none, or does not answer."""
    if not facts.pid or not spec.collectives.exists():
        return ""  # the signal would end it
    before = _written(spec.collectives)
    if nodes.signal(facts.address, facts.pid, ASK_SIGNAL):
        return ""
    end = time.monotonic() + STACK_WAIT_S
    while time.monotonic() < end:
        time.sleep(0.1)
        if _written(spec.collectives) != before and (text := spec.collectives.read_text().rstrip()):
            return text
    return ""


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns
