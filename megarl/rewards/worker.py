"""The grader process: reads batches of requests, grades one after another, writes each result at once.

Started by graders.py, which holds the deadline; nothing here measures time. It imports no torch: it must start fast.
Frames on both pipes are a length (4 bytes, little-endian) and a pickle: of a list of pickled Items, or of the Grade of
one of them, in their order.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import inspect
import os
import pickle
import signal
import struct
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO

from megarl.core.errors import UserError
from megarl.core.importing import raised_at
from megarl.core.words import shortened
from megarl.rewards.grade import MOST_SHOWN, Grade, Item, failed, grade_of
from megarl.rewards.resolve import PARAMETERS, RewardFn, asked_for, resolve_reward

HEADER = struct.Struct("<I")
PR_SET_PDEATHSIG = 1

# What a function imports at the first answer that needs it, most of a second: done while nobody asks, behind whoever starts.
NEEDED_LATER = {"math": "math_verify"}
BEHIND = 5  # of the scheduler's niceness: a third of another's share

# The first frame of a worker: (READY, None), or (REFUSED, why).
READY = "ready"
REFUSED = "refused"


def frame(value: object) -> bytes:
    """A length and a pickle."""
    body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def grade(function: RewardFn, wait: Callable[[Any], Any], item: Item, optional: Collection[str] = ()) -> Grade:
    """The function's grade, or why there is none: `error: ... (FILE, line N)` or `not a number: ...`.

    wait: gives what a coroutine gives. optional: which of OPTIONAL it asks for.
    """
    said = item.said
    try:
        found = function(**{name: said[name] for name in (*PARAMETERS, *optional)})
        return grade_of(wait(found) if inspect.iscoroutine(found) else found)
    except (Exception, SystemExit) as error:  # a user's function may raise anything; the run goes on
        where = raised_at(error)
        return failed(shortened(f"error: {type(error).__name__}: {_words(error)}", MOST_SHOWN - len(where) - 3) + where)


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:  # its class is the user's, too
        return f"(it cannot be shown: {type(another).__name__})"


class Loop:
    """One event loop for all that coroutine functions keep, such as connections; made for the first, since most have none."""

    def __init__(self) -> None:
        self._runner: Any = None

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_: object) -> None:
        if self._runner is not None:
            self._runner.close()

    def run(self, coroutine: Any) -> Any:
        """What it gives in the end."""
        if self._runner is None:
            import asyncio  # takes a while

            self._runner = asyncio.Runner()
        return self._runner.run(coroutine)


def serve(function: RewardFn, requests: BinaryIO, results: int) -> None:
    """Grade until the pipe of requests closes."""
    optional = asked_for(function)
    with Loop() as loop:
        while header := requests.read(HEADER.size):
            (size,) = HEADER.unpack(header)
            for item in pickle.loads(requests.read(size)):
                _write(results, grade(function, loop.run, pickle.loads(item), optional))


def _write(pipe: int, value: object) -> None:
    data = memoryview(frame(value))
    while data:
        data = data[os.write(pipe, data) :]


def _die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends, also where the parent is killed."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the request was made


def _import_behind(module: str) -> None:
    """Import it in a thread that stands back for everybody else."""
    thread = threading.get_native_id()
    # Added, not set: Ray's workers stand back already, and nobody without privileges may come forward.
    os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + BEHIND))
    importlib.import_module(module)


def main() -> None:
    """The entry point of a grader process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fn", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    _die_with(options.parent)
    # What the user's function prints or reads must not get between the frames.
    requests = os.fdopen(os.dup(0), "rb")
    results = os.dup(1)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    try:
        function = resolve_reward(options.fn, key=options.key)
    except UserError as error:
        _write(results, (REFUSED, str(error)))
        return
    _write(results, (READY, None))
    if options.fn in NEEDED_LATER:
        threading.Thread(target=_import_behind, args=(NEEDED_LATER[options.fn],), daemon=True).start()
    serve(function, requests, results)


if __name__ == "__main__":
    main()
