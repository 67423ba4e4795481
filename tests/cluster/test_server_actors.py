"""What the process beside a server writes down for the janitor."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from megarl.cluster.server_actors import ServerActor
from megarl.core.errors import WorkerDiedError
from megarl.serving.process import Command, Endpoint, ManagedProcess


def test_names_that_are_known_are_written_down_before_the_server_starts(tmp_path: Path) -> None:
    """Nobody sees what a process has mapped that is killed at once."""
    registry, seen = tmp_path / "registry.txt", tmp_path / "seen.txt"
    code = "import os, shutil, signal, sys; shutil.copy(*sys.argv[1:]); os.kill(os.getpid(), signal.SIGKILL)"
    argv = (sys.executable, "-c", code, str(registry), str(seen))
    actor = ServerActor.__new__(ServerActor)
    actor._registry = registry
    actor._process = ManagedProcess(
        Command("server 0", argv, tmp_path / "log", Endpoint("127.0.0.1", 1, "/"), segments=("a-segment",))
    )
    with pytest.raises(WorkerDiedError, match=f"by signal {signal.SIGKILL:d}"):
        asyncio.run(actor.start(20))
    actor._process.stop()
    assert os.path.exists(seen), "the registry was not there yet"
    assert seen.read_text().split() == ["a-segment"]
