"""Logging of a run: everything to a file in its folder, what matters to the console in a short form. No secrets.

Libraries' own logs are not touched; megarl's loggers are the children of `megarl`.
"""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from megarl.core.errors import MegarlError
from megarl.core.interrupts import as_error

ROOT = "megarl"
HIDDEN = "[hidden]"
# What moves a terminal's cursor, names its window or turns the direction of text, but for the ends of lines and tabs. Errors of
# graders and tools quote what a model wrote.
_UNSEEN = [*range(0x00, 0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_AS_ESCAPES = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _UNSEEN}


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: get_logger(__name__). What runs as a script gets a name under megarl as well."""
    return logging.getLogger(name if name == ROOT or name.startswith(f"{ROOT}.") else f"{ROOT}.{name}")


def visible(text: str) -> str:
    """The text with control characters as escapes, so that whoever reads it sees them, and their terminal does not obey them."""
    return text.translate(_AS_ESCAPES)


class HidingFormatter(logging.Formatter):
    """Leaves secrets out of whatever is logged, stack traces included, and shows control characters as escapes."""

    def __init__(self, pattern: str, time_pattern: str, secrets: Iterable[str] = ()) -> None:
        super().__init__(pattern, time_pattern)
        self.secrets = {secret for secret in secrets if secret}

    def format(self, record: logging.LogRecord) -> str:
        """The line, with every secret replaced."""
        line = super().format(record)
        # The longest first: a secret may contain another.
        for secret in sorted(self.secrets, key=len, reverse=True):
            line = line.replace(secret, HIDDEN)
        return visible(line)


class _ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what is stderr now: a live display replaces it while it runs."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _FileHandler(logging.FileHandler):
    """Says nothing of a full disk, which would be a stack trace a line: the run's own error does."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not _says_full(sys.exc_info()[1]):
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except (
            OSError
        ) as error:  # what could not be written is tried once more, and would take the place of the run's own error
            if not _says_full(error):
                raise


def _says_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class RunLog:
    """The handlers of one run: close() takes them off again, as leaving it does, which writes down what error leaves it."""

    handlers: tuple[logging.Handler, ...]

    def hide(self, secret: str) -> None:
        """From now on, this text is not written."""
        for handler in self.handlers:
            assert isinstance(handler.formatter, HidingFormatter)
            if secret:
                handler.formatter.secrets.add(secret)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            error = as_error(error)
        if error is not None:
            # For the file alone: the command line prints it, to whoever is still there.
            get_logger(ROOT).info("ended: %s", error.told() if isinstance(error, MegarlError) else repr(error))
        self.close()

    def close(self) -> None:
        """Flush and close the file; log as if setup_logging had not been called."""
        logger = logging.getLogger(ROOT)
        for handler in self.handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.propagate = True


def setup_logging(
    file: Path,
    *,
    console_level: int | None = logging.WARNING,
    secrets: Iterable[str] = (),
) -> RunLog:
    """Send megarl's logs to `file` (appended; its folder is made) and, from console_level on, to stderr.

    console_level: None for no console, as in a rank. secrets: texts never to be written, such as API keys.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    secrets = tuple(secrets)
    to_file = _FileHandler(file, encoding="utf-8")
    to_file.setLevel(logging.INFO)
    to_file.setFormatter(
        HidingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S", secrets)
    )
    handlers: list[logging.Handler] = [to_file]
    if console_level is not None:
        to_console = _ConsoleHandler()
        to_console.setLevel(console_level)
        to_console.setFormatter(HidingFormatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S", secrets))
        handlers.append(to_console)
    logger = logging.getLogger(ROOT)
    logger.setLevel(min(handler.level for handler in handlers))
    logger.propagate = False  # a library's handler on the root logger would print every line twice
    for handler in handlers:
        logger.addHandler(handler)
    return RunLog(tuple(handlers))
