"""A supervised subprocess with an HTTP endpoint: started, awaited, stopped, cleaned up after. Knows nothing of SGLang.

Every process gets a session of its own, a log file, a secret on its standard input (never on a command line, where
every user of the machine could read it), and the kernel's order to die with the thread that started it.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megarl.core import janitor
from megarl.core.errors import DeadlineError, WorkerDiedError
from megarl.core.log_tail import own_words

GUARD = Path(__file__).with_name("guarded.py")
POLL_S = 0.1
CONNECT_S = 2.0
KILL_WAIT_S = 5.0


@dataclass(frozen=True)
class Endpoint:
    """Where a process answers HTTP, and the path that says that it is ready.

    work_path: of what it answers only where all of it works, such as its scheduler; default: the same.
    """

    host: str
    port: int
    ready_path: str
    work_path: str = ""

    @property
    def url(self) -> str:
        """http://host:port."""
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True)
class Command:
    """What to start. `secret` is written to its standard input as one line.

    segments: names under /dev/shm of what it will make there, as far as they are known: nobody has to see it alive for them.
    """

    name: str  # for people: "server 1"
    argv: tuple[str, ...]
    log: Path
    endpoint: Endpoint
    env: Mapping[str, str] = field(default_factory=dict)
    secret: str = field(default="", repr=False)
    segments: tuple[str, ...] = ()


class ManagedProcess:
    """One running command. `stop` leaves no process of it, and no shared memory.

    kept: its ports, which nobody else gets until it is ready (core/ports).
    """

    def __init__(self, command: Command, kept: Sequence[socket.socket] = ()) -> None:
        self.command = command
        self._let_go = weakref.finalize(self, _close, kept)
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._segments = {*command.segments}

    @property
    def name(self) -> str:
        """For people."""
        return self.command.name

    @property
    def url(self) -> str:
        """http://host:port."""
        return self.command.endpoint.url

    @property
    def pid(self) -> int:
        """Of the main process. Raises WorkerDiedError when it was never started."""
        if self._process is None:
            raise WorkerDiedError(f"{self.name} was not started.")
        return self._process.pid

    def start(self) -> None:
        """Start the process; returns at once."""
        self.command.log.parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), *self.command.argv]
        with self.command.log.open("ab") as log:
            self._process = subprocess.Popen(
                argv,
                env={**os.environ, **self.command.env},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._pidfd = os.pidfd_open(self._process.pid)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(self.command.secret.encode() + b"\n")
            self._process.stdin.close()
        except BrokenPipeError:
            return  # it died at once: wait_ready says so, with the log

    def alive(self) -> bool:
        """Whether the main process runs."""
        return self._process is not None and self._process.poll() is None

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until the endpoint answers 200.

        Raises WorkerDiedError as soon as the process has ended, DeadlineError after `deadline_s`; both show its log.
        """
        end = time.monotonic() + deadline_s
        while True:
            ready = self.answers()
            if not self.alive():  # whoever answers there is another
                raise WorkerDiedError(f"{self.name} ended while it started. {self.epitaph()}")
            if ready:
                break
            if time.monotonic() > end:
                raise DeadlineError(
                    f"{self.name} was not ready within {deadline_s:g} s: {self.url}{self.command.endpoint.ready_path} "
                    f"did not answer 200. Raise deadlines.start_s if it only needs longer.\n{self._shown_log()}"
                )
            # Wakes up early when the process ends.
            janitor.readable(self._pidfd, POLL_S)
        self.shm_names()
        self._let_go()

    def answers(self, timeout_s: float = CONNECT_S) -> bool:
        """Whether the endpoint answers 200 within so many seconds that it is ready."""
        return self._answers(self.command.endpoint.ready_path, timeout_s)

    def works(self, timeout_s: float) -> bool:
        """Whether the endpoint answers 200 within so many seconds where all of the process has to work for it."""
        endpoint = self.command.endpoint
        return self._answers(endpoint.work_path or endpoint.ready_path, timeout_s)

    def _answers(self, path: str, timeout_s: float) -> bool:
        endpoint = self.command.endpoint
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False  # not listening yet, or not answering
        finally:
            connection.close()

    def wait_exit(self, timeout_s: float) -> bool:
        """Wait until the main process has ended; False when it still runs after `timeout_s`."""
        if not self.alive():
            return True
        janitor.readable(self._pidfd, timeout_s)
        return not self.alive()

    def shm_names(self) -> frozenset[str]:
        """Names under /dev/shm that this process and its descendants hold now or held at an earlier call, or are known to make.

        Without the memory that weights came in: it is a rank's.
        """
        if self._process is not None:
            tree = process_tree(self.pid)
            held = janitor.segments_of(tree) | _open_segments(tree)
            self._segments |= {name for name in held if _maker(name) in (None, *tree)}
        return frozenset(self._segments)

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the log that are the process's own words."""
        return own_words(self.command.log, lines)

    def epitaph(self) -> str:
        """How the process ended, and the end of its log."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            how = "It has not ended."
        elif code < 0:
            # Most real-time signals have no name.
            name = f" ({signal.Signals(-code).name})" if -code in {*signal.Signals} else ""
            how = f"It was ended by signal {-code}{name}."
        else:
            how = f"Its exit code was {code}."
        return f"{how}\n{self._shown_log()}"

    def stop(self, term_s: float = 5.0) -> None:
        """Ask the process to end, wait `term_s`, kill its whole group, and remove its shared memory. Safe to repeat."""
        self._let_go()
        if self._process is None or self._pidfd < 0:
            return
        self.shm_names()
        tree = process_tree(self.pid)
        group = self.pid  # it leads a session of its own
        if self.alive():
            self._process.terminate()
            self.wait_exit(term_s)
        janitor.kill_all({*tree, *_members(group)})
        self._process.wait(KILL_WAIT_S)
        janitor.await_exit(tree, KILL_WAIT_S)
        os.close(self._pidfd)
        self._pidfd = -1
        for name in self._segments | janitor.segments_by(tree):
            (janitor.SHARED_MEMORY / name).unlink(missing_ok=True)

    def _shown_log(self) -> str:
        return f"--- end of {self.command.log}:\n{self.log_tail()}"


def process_tree(pid: int) -> list[int]:
    """A pid and its living descendants."""
    parents: dict[int, list[int]] = {}
    for each in janitor.everybody():
        with suppress(OSError):  # it ended meanwhile
            parents.setdefault(int(janitor.stat_of(each)[1]), []).append(each)
    tree, queue = [], [pid]
    while queue:
        current = queue.pop()
        tree.append(current)
        queue += parents.get(current, [])
    return tree


def start_all(processes: Sequence[ManagedProcess], deadline_s: float) -> None:
    """Start processes side by side and wait for all; stops every one of them when one fails."""
    end = time.monotonic() + deadline_s
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.wait_ready(max(0.0, end - time.monotonic()))
    except BaseException:
        for process in processes:
            process.stop()
        raise


def _close(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _maker(name: str) -> int | None:
    """The process that made a segment, where torch named it: torch_<pid>_..."""
    first, *rest = name.split("_")
    return int(rest[0]) if first == "torch" and rest and rest[0].isdigit() else None


def _open_segments(pids: Iterable[int]) -> set[str]:
    names = set()
    for pid in pids:
        try:
            targets = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue  # it ended meanwhile
        names |= {target.removeprefix("/dev/shm/") for target in targets if target.startswith("/dev/shm/")}
    return {name for name in names if not name.endswith("(deleted)")}


def _members(group: int) -> list[int]:
    """Living processes of a process group: those that lost their parent are not in the tree any more."""
    found = []
    for pid in janitor.everybody():
        with suppress(OSError):  # it ended meanwhile
            if int(janitor.stat_of(pid)[2]) == group:
                found.append(pid)
    return found
