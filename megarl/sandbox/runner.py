"""The interpreter inside of a sandbox: says that it is ready, waits for one job, and runs it. Given to Python as text.

It imports nothing of megarl, and little else: what it imports, every sandbox pays for when it starts.
"""

from __future__ import annotations

import _operator
import _socket
import builtins
import marshal
import os
import resource
import sys

TYPE_CHECKING = False  # `typing` itself would take longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

FOLDER = "/tmp"
MOST_TEXT = 65536  # characters of a value or an error that go back
MOST_TOLD = 2**19  # of what goes from one sandbox to another
# Values beside the built-in ones that go there, and what each is made of.
MADE: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "builtins.bytearray": lambda value: (bytes(value),),
    "builtins.frozenset": lambda value: ([*value],),
    "collections.deque": lambda value: ([*value],),
} | dict.fromkeys(
    (
        "fractions.Fraction",
        "decimal.Decimal",
        *(f"datetime.{name}" for name in ("date", "time", "datetime", "timedelta")),
    ),
    lambda value: tuple(value.__reduce__()[1]),
)


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
                os._exit(1)  # nobody wants this sandbox any more
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


class NoLiteralError(ValueError):
    """Of a value that is no data."""


class Held:
    """What stays in the other sandbox. reference: the expression that it is there."""

    __slots__ = ("_reference",)
    _reference: str


def literal(value: Any, depth: int = 0, far: bool = False) -> str:
    """The value as a literal, of the built-in types alone: what a subclass says of itself does not count.

    far: as an expression that the other sandbox of two reads, which has a few more types.
    """
    if depth > 50:
        raise ValueError("it is nested too deeply")
    kind = type(value)
    if far and issubclass(kind, Held):
        return str(value._reference)
    text = _atom(value, kind, far)
    return _several(value, kind, depth + 1, far) if text is None else text


def _atom(value: Any, kind: type[Any], far: bool) -> str | None:
    """A single value as a literal; None where it is none."""
    if value is None or value is True or value is False:
        return repr(value)
    plain = next((each for each in (int, float, complex, str, bytes) if issubclass(kind, each)), None)
    if plain is None:
        return None
    if plain is int and far and int.bit_length(value) > 4096:
        return int.__format__(value, "#x")  # of decimal digits Python reads no more than 4300
    text = str(plain.__repr__(value))
    if plain is float:
        text = text.replace("inf", "1e999")
    if plain in (float, complex) and "n" in text:
        if not far or plain is complex:
            raise ValueError(f"{text} has no literal")
        text = "_made('builtins.float', 'nan')"
    return text


def _several(value: Any, kind: type[Any], depth: int, far: bool) -> str:
    """What holds other values, as a literal."""
    if issubclass(kind, dict):
        pairs = [f"{literal(k, depth, far)}: {literal(v, depth, far)}" for k, v in dict.items(value)]
        return "{" + ", ".join(pairs) + "}"
    for plain, brackets in ((list, "[]"), (tuple, "()"), (set, "{}"), (frozenset, "{}")):
        if issubclass(kind, plain) and not (far and plain is frozenset):  # which a set may hold
            inside = "".join(literal(each, depth, far) + ", " for each in plain.__iter__(value))
            return brackets[0] + inside + brackets[1] if inside or brackets != "{}" else "set()"
    name = "builtins.frozenset" if issubclass(kind, frozenset) else f"{kind.__module__}.{kind.__qualname__}"
    if far and name in MADE:
        return f"_made({name!r}, *{literal(MADE[name](value), depth, far)})"
    raise NoLiteralError(f"it is a {kind.__name__}, which has no literal")


def made(name: str, *given: Any) -> Any:
    """A value of one of the types in MADE, or what is no number."""
    module, _, kind = name.rpartition(".")
    return getattr(__import__(module), kind)(*given)


def done(name: str) -> Any:
    """A function of Python's own by its name, whatever the code calls so."""
    return getattr(builtins, name, None) or getattr(_operator, name)


class Kept:
    """For another sandbox: calls what it asks for, and keeps what is no data."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self.names = {"_made": made, "_do": done, "_call": self.call, "_held": self._values}

    def call(self, function: Any, given: list[Any], named: dict[str, Any]) -> str:
        """What a call gives, with those of its arguments that it has changed."""
        before = [_changing(each) for each in given]
        value = function(*given, **named)
        texts = zip(before, map(_changing, given), strict=True)
        after = {number: given[number] for number, (was, now) in enumerate(texts) if now not in (was, None)}
        try:
            return literal(("value", value, after), 0, True)
        except ValueError:
            self._values.append(value)
            return literal(("held", len(self._values) - 1, after), 0, True)


def _changing(value: Any) -> str | None:
    """An argument that a call may change, as text; None where it cannot be, or holds what is no data."""
    try:
        return literal(value, 0, True) if type(value) in (list, dict, set) else None
    except ValueError:
        return None


def check(kind: str, source: str, names: dict[str, Any], kept: Kept) -> bytes:
    """One check of the job: `+` and its value, or `-` and what went wrong."""
    try:
        if kind == "call":
            text: str = eval(compile(source, "<check>", "eval"), names, kept.names)
            if len(text) > MOST_TOLD:
                raise ValueError(f"its value has {len(text)} characters")
            return b"+" + text.encode("utf-8", "backslashreplace")
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


def run(job: dict[str, Any], channel: Channel | None, far: Channel | None) -> None:
    """Run the program as `__main__`, then its checks. far: leads to what the program calls in another sandbox."""
    main = type(sys)("__main__")
    main.__dict__["__builtins__"] = builtins
    main.__dict__["__file__"] = job["script"]
    sys.modules["__main__"] = main
    sys.argv = [job["script"]]
    sys.path.insert(0, FOLDER)
    if far is not None:
        exec(compile(job["stand_ins"], "<stand_ins>", "exec"), globals())
        main.__dict__.update(globals()["stand_ins"](job["asks"], far))
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
        kept = Kept()
        while True:
            kind, source = channel.read()
            channel.write(check(kind, source, main.__dict__, kept))


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
    channel, far = (opened if job[what] else None for what in ("checked", "asks"))
    if channel is None and far is None:
        opened.socket.close()
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # what `site` gives, which is not loaded
    bound(job["limits"])
    run(job, channel, far)


start()
