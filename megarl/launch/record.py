"""What a run's folder remembers of its last submission: launch/submission.json, beside the job's script and log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from megarl.core.disk import replace_text
from megarl.core.errors import UserError
from megarl.core.json_file import whole_lines
from megarl.report.history import METRICS_FILE

KIND = Literal["slurm", "ray"]
FOLDER, FILE, EVENTS = "launch", "submission.json", "events.jsonl"
LAST_BYTES = 2**18  # of the metrics, that are looked at for the last step: a row has some thousand


@dataclass(frozen=True)
class Submission:
    """One submission. job: SLURM's number or Ray's submission id. log: file of a SLURM job.

    address: of the Ray cluster; of SLURM's, the name where it is another than the one that is here.
    """

    kind: KIND
    job: str
    address: str = ""
    log: str = ""

    def write(self, run: Path) -> None:
        """Remember it as the run's last."""
        folder = run / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / FILE, json.dumps(asdict(self), indent=1) + "\n")


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Within, what the system refuses of a file in a run's folder, as of somebody else's run, is a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}.") from error


def last_submission(run: Path) -> Submission | None:
    """The last submission of the run in this folder; None where there was none. Raises UserError for one that is no record."""
    file = run / FOLDER / FILE
    if not file.is_file():
        return None
    try:
        with reading(file):
            text = file.read_text()
        found = Submission(**json.loads(text))
        if found.kind not in get_args(KIND) or not all(isinstance(value, str) for value in asdict(found).values()):
            raise ValueError("its fields are texts, and kind is slurm or ray")
        return found
    except UserError:
        raise
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is no record of a submission ({error}). Remove it to submit the run again.") from None


def find_submission(run: Path) -> Submission:
    """`last_submission`, where there has to be one. Raises UserError."""
    found = last_submission(run)
    if found is None:
        there = ", ".join(str(each) for each in submitted_runs(run.parent)) or "none"
        raise UserError(
            f"{run} is not the folder of a run that was submitted from here. Submitted runs in {run.parent}: {there}."
        )
    return found


def submitted_runs(folder: Path) -> list[Path]:
    """Folders of runs that were submitted, of those in this folder."""
    return sorted(file.parent.parent for file in folder.glob(f"*/{FOLDER}/{FILE}"))


def last_exit_code(run: Path, job: str) -> int | None:
    """Of the last driver of a SLURM job, as the job's leader wrote it down; None where none has ended."""
    with reading(run / FOLDER / EVENTS):
        events = whole_lines(run / FOLDER / EVENTS)
    codes = [
        event["exit_code"] for event in events if event.get("job") == job and isinstance(event.get("exit_code"), int)
    ]
    return codes[-1] if codes else None


def steps_done(run: Path) -> int | None:
    """The last step in the run's metrics; None where there is none yet. Of a long run that is the end of a large file."""
    with reading(run / METRICS_FILE):
        lines = whole_lines(run / METRICS_FILE, last_bytes=LAST_BYTES) or whole_lines(run / METRICS_FILE)
    steps = [line["step"] for line in lines if isinstance(line.get("step"), int)]
    return steps[-1] if steps else None
