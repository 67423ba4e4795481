"""Goes back to a run's last checkpoint because of a step that is not to be learned from, and on with the data behind it.

The journal says so: the run is made again from the checkpoint (recovery.py), and passes over what it had asked for since. A later
start, and a replay, do the same, since they read the same journal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megarl.core.errors import RewindError
from megarl.run.recovery import RewoundError
from megarl.training.run_checkpoints import Checkpoints


@contextmanager
def rewinding(samples: Any, checkpoints: Checkpoints) -> Iterator[None]:
    """Around the steps of a run. samples: `rewind` writes it down.

    Raises RewoundError in the place of a RewindError, unless the run has gone back to that checkpoint too often.
    """
    try:
        yield
    except RewindError as error:
        # What `--continue` will find; one that is still being written is none.
        last = checkpoints.latest() if checkpoints.committed() else None
        step, number = (last.step, last.state["data"]["decisions"]) if last is not None else (0, 0)
        whence = f"the checkpoint of step {step}" if step else "the base model"
        if number is None:
            error.add_note(f"The run cannot go back to {whence}: it was committed without a journal.")
            raise
        if not samples.rewind(step, number):
            error.add_note(f"The run has gone back to {whence} as often as train.max_rewinds allows.")
            raise
        raise RewoundError(f"rewind: the run goes back to {whence}, and on with other data. {error}") from error
