"""The interpreter inside of a sandbox: says that it is ready, waits for one job, and runs it. Given to Python as text.

It imports nothing of megarl, and little else: what it imports, every sandbox pays for when it starts.
"""

from __future__ import annotations

import _socket
import builtins
import marshal
import os
import resource
import sys

TYPE_CHECKING = False  # `typing` itself would take longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

FOLDER = "/tmp"
MOST_TEXT = 65536  # characters of a value or an error that go back


class Channel:
    """Frames: eight bytes of length, then plain values as `marshal` writes them, or bytes on the way out.

    What goes out is read by somebody who must not trust it.
    """

    def __init__(self, fd: int) -> None:
        self.socket = _socket.socket(fileno=fd)

    def ready(self) -> None:
        """Say so, and hand over the folder: how full it is can be asked of it from outside."""
        folder = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY)
        rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, folder.to_bytes(4, sys.byteorder))
        self.socket.sendmsg([b"ready"], [rights])
        os.close(folder)

    def read(self) -> Any:
        """The next frame; ends the process where nobody wants it any more."""
        size = int.from_bytes(self._exactly(8), "little")
        return marshal.loads(self._exactly(size))

    def write(self, data: bytes) -> None:
        """Send a frame."""
        self.socket.sendall(len(data).to_bytes(8, "little") + data)

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self.socket.recv(min(size, 1 << 20))
            if not part:
                os._exit(0)  # nobody wants this sandbox any more
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def literal(value: Any, depth: int = 0) -> str:
    """The value as a literal, of the built-in types alone: what a subclass says of itself does not count."""
    if depth > 50:
        raise ValueError("it is nested too deeply")
    if value is None or value is True or value is False:
        return repr(value)
    kind = type(value)
    for plain in (int, float, complex, str, bytes):
        if issubclass(kind, plain):
            text = str(plain.__repr__(value))
            if plain is float:
                text = text.replace("inf", "1e999")
            if plain in (float, complex) and "n" in text:
                raise ValueError(f"{text} has no literal")
            return text
    if issubclass(kind, dict):
        pairs = [f"{literal(k, depth + 1)}: {literal(v, depth + 1)}" for k, v in dict.items(value)]
        return "{" + ", ".join(pairs) + "}"
    if issubclass(kind, list):
        return "[" + "".join(literal(each, depth + 1) + ", " for each in list.__iter__(value)) + "]"
    if issubclass(kind, tuple):
        return "(" + "".join(literal(each, depth + 1) + ", " for each in tuple.__iter__(value)) + ")"
    for several in (set, frozenset):
        if issubclass(kind, several):
            inside = "".join(literal(each, depth + 1) + ", " for each in several.__iter__(value))
            return "{" + inside + "}" if inside else "set()"
    raise ValueError(f"it is a {kind.__name__}, which has no literal")


def check(kind: str, source: str, names: dict[str, Any]) -> bytes:
    """One check of the job: `+` and its value, or `-` and what went wrong."""
    try:
        if kind == "value":
            text = literal(eval(compile(source, "<check>", "eval"), names))
            if len(text) > MOST_TEXT:
                raise ValueError(f"its value has {len(text)} characters")
            return b"+" + text.encode("utf-8", "backslashreplace")
        exec(compile(source, "<check>", "exec"), names)
    except BaseException as error:  # the code may raise anything, SystemExit as well
        said = f"{type(error).__name__}: {error}"[:MOST_TEXT]
        return b"-" + said.encode("utf-8", "backslashreplace")
    return b"+"


def bound(limits: list[tuple[str, int]]) -> None:
    """Take on the limits of one process. What counts over all of them is held outside."""
    for name, value in limits:
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (most, most))


def put(name: str, data: bytes) -> None:
    """Write a file below the folder."""
    path = os.path.join(FOLDER, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def run(job: dict[str, Any], channel: Channel | None) -> None:
    """Run the program as `__main__`, then its checks."""
    main = type(sys)("__main__")
    main.__dict__["__builtins__"] = builtins
    main.__dict__["__file__"] = job["script"]
    sys.modules["__main__"] = main
    sys.argv = [job["script"]]
    sys.path.insert(0, FOLDER)
    try:
        # As in this file, annotations are not evaluated: answers say `List[int]` and leave the import to whoever grades them.
        exec(compile(job["code"], job["script"], "exec"), main.__dict__)
    except SystemExit:
        if channel is None:
            raise
    except BaseException as error:
        trace = error.__traceback__
        error.__traceback__ = trace.tb_next if trace else None  # not what is above the program
        sys.excepthook(type(error), error, error.__traceback__)
        if channel is None:
            sys.stdout.flush()
            sys.exit(1)
    if channel is not None:
        if not getattr(sys.stdout, "closed", True):  # the program may have closed it, or have put nothing in its place
            sys.stdout.flush()
        channel.write(b"done")  # only now the checks come
        for kind, source in channel.read():
            channel.write(check(kind, source, main.__dict__))


def start() -> None:
    """Wait for the job and run it."""
    opened = Channel(int(sys.argv[1]))
    opened.ready()
    job = opened.read()
    for name, data in [
        *job["files"],
        (job["script"], job["code"].encode("utf-8", "replace")),
        (job["input"], job["stdin"]),
    ]:
        put(name, data)
    source = os.open(os.path.join(FOLDER, job["input"]), os.O_RDONLY)
    os.dup2(source, 0)
    os.close(source)
    channel = opened if job["checked"] else None
    if channel is None:
        opened.socket.close()
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # what `site` gives, which is not loaded
    bound(job["limits"])
    run(job, channel)


start()
