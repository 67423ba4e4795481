"""A terminal of its own for a command, which can be closed under it as a lost ssh connection closes one."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

# Below the shell whose terminal it is: whoever tells the exit code hears the signal with all others and goes on. The shell has
# none to tell: it ends with its terminal, and then the kernel sends SIGHUP to whatever it has left in the foreground.
BELOW_A_SHELL = ("sh", "-c", 'bash -c \'trap : HUP; "${@:2}"; echo $? > "$1"\' inner "$@"; :', "shell")
POLL_S = 0.1


class Terminal:
    """Runs one command as the foreground of a terminal. Use as a context manager."""

    def __init__(self, command: Sequence[str], *, stderr: IO[bytes] | None = None, **more: Any) -> None:
        """stderr: the terminal where None. The command leads the terminal's session, as a shell does."""
        self._ours, theirs = pty.openpty()
        self.shown = ""

        def lead() -> None:
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
            if heed := more.get("preexec_fn"):
                heed()

        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs if stderr is None else stderr,
            start_new_session=True,
            **(more | {"preexec_fn": lead}),
        )
        os.close(theirs)

    def read_until(self, wanted: Callable[[str], bool], within_s: float) -> None:
        """Until what was shown is as wanted. Nobody else reads it: the command would stand still once it is full."""
        end = time.monotonic() + within_s
        while not wanted(self.shown):
            assert time.monotonic() < end, self.shown
            if select.select([self._ours], [], [], POLL_S)[0]:
                try:
                    self.shown += os.read(self._ours, 4096).decode(errors="replace")
                except OSError:  # the command has ended
                    raise AssertionError(self.shown) from None

    def close(self) -> None:
        """Nobody is there any more."""
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
