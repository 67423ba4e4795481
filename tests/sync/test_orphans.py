"""Whose folders are removed, by their names."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from megarl.core.process_state import started_at
from megarl.sync.orphans import owner, remove_orphans


def test_folders_of_dead_processes_of_this_host_go_and_no_others(tmp_path: Path) -> None:
    host, pid = socket.gethostname(), os.getpid()
    dead = [f"x-a-{pid}-{(started_at(pid) or 0) + 1}-{host}", f"x-b-{2**22 + 1}-5-{host}"]
    kept = [f"x-c{owner()}", f"x-d-{2**22 + 1}-5-{host}-other", "x-e-no-pid-here", "x-f", f"y-g-{2**22 + 1}-5-{host}"]
    for name in (*dead, *kept):
        (tmp_path / name).mkdir()
    remove_orphans(tmp_path, "x-")
    assert {path.name for path in tmp_path.iterdir()} == set(kept)
