"""Run by `alone.py`: the shared memory of a server is named as whoever starts it expects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from megarl.serving.launcher import name_instance
from megarl.serving.server import load_segment


def main() -> None:
    """Raises AssertionError where SGLang names it otherwise."""
    from sglang.srt.managers.load_snapshot import shm_path_for
    from sglang.srt.server_args import PortArgs

    PortArgs.init_new = staticmethod(lambda *_, **__: SimpleNamespace(instance_id="drawn"))
    name_instance("server-a_b1")
    path = shm_path_for(PortArgs.init_new(None).instance_id)
    assert path == f"/dev/shm/{load_segment(Path('/tmp/x/server-a_b1'))}", path
