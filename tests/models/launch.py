"""Runs a test module as several ranks, and shows what a failed one said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megarl.serving.process import free_port


def run_ranks(module: str, world_size: int, root: Path, deadline_s: float = 180) -> None:
    """`python -m <module> <rank> <world_size> <port> <root>`, once a rank; fails unless every rank ends well."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(world_size), port, str(root)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world_size)
    ]
    errors = []
    for process in processes:
        try:
            errors.append(process.communicate(timeout=deadline_s)[1])
        finally:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world_size, "\n".join(errors)
