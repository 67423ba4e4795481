"""The errors that megarl raises. What a user can mend is a UserError; a passed deadline is a DeadlineError."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


class MegarlError(Exception):
    """Base of every error that megarl raises on purpose; the command line prints it without a stack trace."""

    exit_code = 1


class UserError(MegarlError, ValueError):
    """What a user can mend: the message says what is wrong, where, what is allowed, and what to do.

    The command line prints it as one paragraph and exits with code 2, before any device is taken.
    """

    exit_code = 2


class DeadlineError(MegarlError, TimeoutError):
    """A wait that passed its deadline: names the phase, the role and the ranks; carries stacks and log tails."""


class WorkerDiedError(MegarlError):
    """A process of the run died: names it, how it ended, and shows the last lines of its log."""


class StoppedError(MegarlError):
    """The run has stopped before its end, as it was asked to, with a checkpoint of its last step: it can go on later."""

    exit_code = 75  # what sysexits.h calls a temporary failure


class SyncError(MegarlError):
    """A weight sync that failed or that could not be verified: carries the servers and the numbers."""


@contextmanager
def naming(folders: Mapping[Path, Path]) -> Iterator[None]:
    """Errors within speak of the folders that a user knows.

    folders: where work is done under a temporary name, to what that will be called.
    """
    try:
        yield
    except MegarlError as error:
        text = str(error)
        for temporary, final in folders.items():
            text = text.replace(str(temporary), str(final))
        raise type(error)(text) from error
