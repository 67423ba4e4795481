"""How processes ended that are not this one's children: exit code or signal, and what memory they held last.

Whoever started a process is told its exit code by the kernel, once; Ray does not pass it on. Since Linux 6.15 the kernel also
tells it to everybody who holds a descriptor of the process (pidfd) that was opened in time. An older kernel says nothing, and
then neither does this module. A pid may be another process's later: here one is meant by its pid and its start
(process_state.started_at).
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import threading
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path

from megarl.core.process_state import started_at

# struct pidfd_info of linux/pidfd.h in its first version: a mask of what is asked for and told, ..., the wait status.
_FORMAT = "=QQ11Ii"
_SIZE = struct.calcsize(_FORMAT)
_EXIT = 1 << 3
_GET_INFO = (3 << 30) | (_SIZE << 16) | (0xFF << 8) | 11
MOST = 256  # processes that are held on to before those that have ended are let go of
LOOK_EVERY_S = 2.0  # at their memory
REAPED_S, POLL_S = 1.0, 0.02  # the status is told once its parent has asked for it
WHY = {
    signal.SIGKILL: ": somebody's kill -9, or who ends processes for memory (the kernel, Ray, a scheduler)",
    signal.SIGSEGV: ": it crashed in native code",
    signal.SIGABRT: ": a library gave up, which its log should say",
    signal.SIGBUS: ": it crashed in native code, as it does where shared memory is full",
}
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Ending:
    """For people. how: exit code or signal. held: its memory when it was last looked at. Both empty where nobody can say."""

    how: str = ""
    held: str = ""


@dataclass
class _Watched:
    """A process. file: a descriptor of it. held: resident bytes when it was last looked at."""

    file: int
    held: int = 0


@dataclass
class Endings:
    """Holds on to processes, so that it can be told how they ended; a thread of its own looks at their memory."""

    _watched: dict[tuple[int, int], _Watched] = field(default_factory=dict)  # by pid and start
    _over: threading.Event = field(default_factory=threading.Event)
    _looks: bool = False

    def __post_init__(self) -> None:
        weakref.finalize(self, _let_go, self._watched, self._over)

    def watch(self, pid: int, started: int) -> None:
        """Hold on to a process of this machine; nothing where it has ended."""
        if (pid, started) in self._watched:
            return
        if len(self._watched) >= MOST:
            self._forget_ended()
        try:
            opened = os.pidfd_open(pid)
        except OSError:
            return  # it has ended, or this kernel has no such descriptors
        if started_at(pid) != started:  # another one has its pid now
            os.close(opened)
            return
        self._watched[pid, started] = _Watched(opened, _resident(pid, started))
        if not self._looks:
            self._looks = True
            threading.Thread(target=_look, args=(self._watched, self._over), daemon=True, name="endings").start()

    def _forget_ended(self) -> None:
        """Of a long run's processes, those that ended without anybody asking how."""
        for each in [each for each in self._watched if not _resident(*each)]:
            os.close(self._watched.pop(each).file)

    def told(self, pid: int, started: int) -> Ending:
        """How a process has ended. It is not held on to any longer."""
        watched = self._watched.pop((pid, started), None)
        if watched is None:
            return Ending()
        try:
            status = _status(watched.file)
        finally:
            os.close(watched.file)
        held = f"It held {watched.held / 1e9:.1f} GB when it was last looked at." if watched.held else ""
        return Ending(_words(status) if status is not None else "", held)


def _let_go(watched: dict[tuple[int, int], _Watched], over: threading.Event) -> None:
    over.set()
    while watched:
        os.close(watched.popitem()[1].file)


def _look(watched: dict[tuple[int, int], _Watched], over: threading.Event) -> None:
    """Until it is over. Nothing here holds on to who watches."""
    while not over.wait(LOOK_EVERY_S):
        for (pid, started), each in list(watched.items()):
            each.held = _resident(pid, started) or each.held


def _resident(pid: int, started: int) -> int:
    """Bytes of memory that a process holds; 0 where it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * _PAGE if started_at(pid) == started else 0


def _status(file: int) -> int | None:
    """As a parent is told it; None where the kernel does not tell it to others, or its parent has not asked in time."""
    end = time.monotonic() + REAPED_S
    while True:
        info = bytearray(struct.pack(_FORMAT, _EXIT, *[0] * 13))
        try:
            fcntl.ioctl(file, _GET_INFO, info)
        except OSError:
            return None
        mask, *_, status = struct.unpack(_FORMAT, info)
        if mask & _EXIT:
            return int(status)
        if time.monotonic() > end:
            return None
        time.sleep(POLL_S)


def _words(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"It exited with code {code}."
    if -code not in {*signal.Signals}:
        return f"It was ended by signal {-code}."
    number = signal.Signals(-code)
    return f"It was ended by {number.name}{WHY.get(number, '')}."
