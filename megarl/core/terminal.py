"""Standard output and standard error on a terminal that may be closed while the command runs. Not for pipes and files."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

from megarl.core.log import get_logger

log = get_logger(__name__)


def forget_no_width() -> None:
    """A width of 0, as of a terminal that was never sized, is none: tables would have nothing in them."""
    if not os.environ.get("COLUMNS", "1").strip("0"):
        del os.environ["COLUMNS"]


def outlive_terminal() -> None:
    """From now on, what is printed to a terminal that was closed goes nowhere, whoever prints it.

    The system answers EIO to it, which would end the command wherever it prints next, as it is taken apart too.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.isatty():
            stream.flush()
            outlives = io.TextIOWrapper(
                io.BufferedWriter(_Terminal(stream.fileno(), "wb", closefd=False)),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, outlives)


class _Terminal(io.FileIO):
    """The descriptor of a terminal; of nowhere, once that is closed."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        # For a log's file alone: a warning would be printed, by whoever prints just now.
        log.info("the terminal is closed: what is printed goes nowhere")
        return memoryview(data).nbytes
