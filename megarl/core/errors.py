"""The errors that megarl raises. What a user can mend is a UserError; a passed deadline is a DeadlineError."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megarl.core.end_signals import interrupted_by
from megarl.core.exit_codes import FAULT, REFUSED, STOPPED


class MegarlError(Exception):
    """Base of every error that megarl raises on purpose; the command line prints it without a stack trace.

    recoverable: whether the run may go on by itself, from its last checkpoint and its journal (run/recovery.py).
    """

    exit_code = FAULT
    recoverable = False

    def told(self) -> str:
        """The message with its notes: what is known of the run that it ended."""
        return "\n".join([str(self), *getattr(self, "__notes__", ())])


class UserError(MegarlError, ValueError):
    """What a user can mend: the message says what is wrong, where, what is allowed, and what to do.

    The command line prints it as one paragraph and exits with code 2, before any device is taken. One that comes out of a
    run that has begun is a fault like others, and ends with code 1.
    """

    exit_code = REFUSED


class DamageError(UserError):
    """What is on disk is not as it was written. Who was asked whether it is ends with code 1 (`megarl convert inspect`)."""


class DeadlineError(MegarlError, TimeoutError):
    """A wait that passed its deadline: names the phase, the role and the ranks; carries stacks and log tails."""


class WorkerDiedError(MegarlError):
    """A process of the run died: names it, how it ended, and shows the last lines of its log."""

    recoverable = True


class GivenUpError(WorkerDiedError):
    """Nothing is started again: too many processes died, or none that could do the work comes back."""

    recoverable = False


class CoordinatorDiedError(GivenUpError):
    """Nobody knows any more which samples there are; the journal does."""

    recoverable = True


class GradientError(MegarlError):
    """An optimizer step that was not taken, because its gradient is not finite or a spike: says which, and the norm."""


class UnusableError(MegarlError):
    """A step or an evaluation whose samples cannot be used: too many have no grade, or none has a response."""


class DriftError(MegarlError):
    """A step that was not learned from, because the rollout's log-probs are too far from the trainer's: says how far."""


class RewindError(MegarlError):
    """A step that was not learned from, and the recipe wants the run to go back to its last checkpoint for it."""


class StoppedError(MegarlError):
    """The run has stopped before its end, as it was asked to, with a checkpoint of its last step: it can go on later."""

    exit_code = STOPPED


class InterruptError(MegarlError):
    """A signal has ended the command: Ctrl-C, SIGTERM or SIGHUP. Its exit code is 128 + the signal's number, as shells say it."""

    def __init__(self, number: int) -> None:
        super().__init__(interrupted_by(number))
        self.exit_code = 128 + number


class DiskFullError(MegarlError):
    """A disk is full: names it, and what there is of it."""


class SyncError(MegarlError):
    """A weight sync that failed or that could not be verified: carries the servers and the numbers."""


class TornError(SyncError):
    """A weight version on the disk that is not as it was written: names the file, and what is wrong. Nobody loads it."""


class UnfitServerError(MegarlError):
    """A server that somebody else started cannot be used: says which, why and what to do, in one paragraph."""


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


class TemplateRefusalError(MegarlError):
    """The model's chat template has raised an error, knows no such role, or leaves out what an assistant said."""
