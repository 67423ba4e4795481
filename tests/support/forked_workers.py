"""Workers of tests/suite.py as copies of one process that has collected all tests, which costs 20 seconds of a core each time.

xdist starts a worker by a command, whose standard input and output it talks through. That command is this file: it hands the
two to the process that makes copies, and waits for its copy. Where nobody makes any, it becomes a worker of the usual kind.

    python forked_workers.py SOCKET -u -c CODE

Not for devices: CUDA survives no fork.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

CODE_BYTES = 2**16
_collecting_s = 0.0


def collecting_s() -> float:
    """Seconds of a processor that the process it was copied from had taken: in the first copy, so that they are counted once."""
    return _collecting_s


@contextmanager
def copies(folder: str, words: Sequence[str]) -> Iterator[str]:
    """Makes copies meanwhile; gives the command of a worker. folder: for the socket, nobody else's. words: what is collected."""
    import subprocess

    path = f"{folder}/workers"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(64)
        collector = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listening.fileno()), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[listening.fileno()],
        )
    try:
        yield shlex.join([sys.executable, "-I", __file__, path])
    finally:
        collector.kill()
        collector.wait()


def hand_over(path: str, words: list[str]) -> None:
    """What a worker's command does. words: for Python."""
    try:
        with socket.socket(socket.AF_UNIX) as maker:
            maker.connect(path)
            socket.send_fds(maker, [json.dumps(words[-1]).encode()], [0, 1, 2])
            pid = int(maker.recv(32) or b"0")
            copy = os.pidfd_open(pid) if pid else -1
            maker.sendall(b"seen")  # until then it has not ended, or is there as one that has
    except OSError:
        pid = 0
    if not pid:
        os.execv(sys.executable, [sys.executable, *words])
    select.select([copy], [], [])


def main(listening: socket.socket, words: list[str]) -> None:
    """Collect, then make a copy for everybody who asks; returns in a copy, once the work of that is done."""
    import pytest

    from megarl.sandbox.kernel import die_with_parent

    global _collecting_s
    die_with_parent()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENIZERS_PARALLELISM", "false")  # no copy has its threads
        pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *words])
    _collecting_s = time.process_time()
    while True:
        asking, _ = listening.accept()
        told, files, _, _ = socket.recv_fds(asking, CODE_BYTES, 3)
        pid = os.fork()
        if pid == 0:
            listening.close()
            asking.close()
            die_with_parent()
            _work(json.loads(told), files)
            return
        _collecting_s = 0.0
        for file in files:
            os.close(file)
        with asking:
            asking.sendall(b"%d" % pid)
            asking.recv(4)


def _work(code: str, files: list[int]) -> None:
    """As `python -u -c CODE`, with these as its standard files."""
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(file, "w", buffering=1, closefd=False) for file in (1, 2))
    sys.argv = ["-c"]
    sys.modules["__main__"] = ModuleType("__main__")
    exec(code, sys.modules["__main__"].__dict__)


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        from tests.support import forked_workers

        forked_workers.main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    else:
        hand_over(sys.argv[1], sys.argv[2:])
