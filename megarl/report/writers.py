"""Where a step's metrics go beside the console: metrics.jsonl always, TensorBoard, wandb and the user's as the recipe says.

Every writer receives the same names; a name that is not in the table of metrics is refused before any of them writes.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import psutil
from pydantic import ValidationError

from megarl.core.errors import MegarlError, StoppedError, UserError
from megarl.core.keys import wandb_key_place
from megarl.core.log import get_logger
from megarl.core.metrics import check_names
from megarl.recipe.schema import AnyRecipe
from megarl.report.history import METRICS_FILE, trim_history
from megarl.report.own_writer import OwnWriter

TENSORBOARD_FOLDER = "tensorboard"
EVENT_FILE = re.compile(r"events\.out\.tfevents\.(\d+)\.")
FINISH_S = 60  # that a run waits in the end for wandb's server, which may answer no more
ANSWER_S = 60.0  # that it waits for wandb's process on this machine; in the end beyond that
WANDBS_PROCESS = "wandb-core"

log = get_logger(__name__)


class MetricWriter(Protocol):
    """Takes every step's metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step. What is written survives the death of this process, at the latest, from the next step on."""

    def close(self, failed: bool = False) -> None:
        """Finish; called exactly once. failed: the run did not come to its end, and was not asked to stop either."""


@contextmanager
def _naming(place: str, step: int) -> Iterator[None]:
    """Raise MegarlError where the system refuses a write, of which it does not say where that was."""
    try:
        yield
    except OSError as error:
        raise MegarlError(
            f"The metrics of step {step} could not be written to {place}: {error.strerror or error}."
        ) from error


class JsonlWriter:
    """metrics.jsonl: a line a step, on the disk before its step's checkpoint is. Values that are not finite are null."""

    def __init__(self, file: Path, resumed_step: int | None = None) -> None:
        """resumed_step: go on after this step, dropping later lines; None begins anew."""
        file.parent.mkdir(parents=True, exist_ok=True)
        if resumed_step is not None:
            trim_history(file, resumed_step)
        self._file = file.open("a" if resumed_step is not None else "w", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step."""
        values = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        with _naming(self._file.name, step):
            self._file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardWriter:
    """Event files, by tensorboard's own records: torch is not needed for a few numbers."""

    def __init__(self, folder: Path, resumed_step: int | None = None) -> None:
        """TensorBoard forgets what earlier files in the folder say of steps after resumed_step; None: of all steps."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = RecordWriter((folder / _event_file(folder)).open("wb"))
        first = 0 if resumed_step is None else resumed_step + 1
        restart = SessionLog(status=SessionLog.START)
        for begin in (Event(file_version="brain.Event:2"), Event(step=first, session_log=restart)):
            begin.wall_time = time.time()
            self._file.write(begin.SerializeToString())
        self._file.flush()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        with _naming(str(self._folder), step):
            self._file.write(event.SerializeToString())
            self._file.flush()

    def close(self, failed: bool = False) -> None:
        """Close the event file."""
        self._file.close()


def _event_file(folder: Path) -> str:
    """A name behind those that are there: TensorBoard reads by names, which begin with seconds.

    The clock may be behind that of the machine where the run was before: of what comes now nothing would be shown.
    """
    seconds = (EVENT_FILE.match(each.name) for each in folder.iterdir())
    last = max((int(match[1]) for match in seconds if match), default=0)
    return f"events.out.tfevents.{max(int(time.time()), last + 1):010d}.{socket.gethostname()}.{os.getpid()}"


class WandbWriter:
    """Weights & Biases: offline, without touching the network, where wandb finds no key. Files lie in the run's folder.

    A resumed run is a new wandb run in the same group: what was sent cannot be taken back.
    """

    def __init__(
        self, folder: Path, project: str, name: str, config: Mapping[str, Any], *, recovered: bool = False
    ) -> None:
        """config: what wandb shows beside the run; plain values.

        recovered: the run goes on by itself, with nobody there to read an error: where wandb's server is not, it writes
        offline.
        """
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "report.wandb is set, but wandb is not installed. Install it (pip install wandb), or leave report.wandb out."
            ) from error
        # The machine's statistics, the program's output and its source are nobody's business but the user's.
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
        )
        if "finish_timeout" in wandb.Settings.model_fields:  # of newer ones
            settings.finish_timeout, settings.finish_timeout_raises = FINISH_S, True
        # None leaves it to the user's own WANDB_MODE, or to wandb: online.
        mode: Literal["offline"] | None = None if os.environ.get("WANDB_MODE") or wandb_key_place() else "offline"
        folder.mkdir(parents=True, exist_ok=True)
        if mode == "offline":
            log.warning(
                "report.wandb is set, and wandb finds no key here: it writes offline into %s. Send it later with `wandb "
                "sync`, or log in first (wandb login).",
                folder / "wandb",
            )
        init = partial(
            wandb.init, project=project, name=name, group=name, config=dict(config), dir=str(folder), settings=settings
        )
        self._teardown = wandb.teardown
        self._run: Any = None
        try:
            self._run = init(mode=mode)
        except wandb.errors.Error as error:
            if not recovered:
                raise UserError(
                    f"wandb could not start: {error}. Set WANDB_MODE=offline to go on without its server."
                ) from error
            log.warning("wandb could not start, and writes offline into %s from here on: %s", folder, error)
            self._run = init(mode="offline")
        except (
            Exception
        ) as error:  # of what it is set to, as by variables and files of its own, and of folders that it uses
            raise UserError(
                f"wandb could not start: {_told(error)}. What it is set to stands in variables (WANDB_...) and in what `wandb "
                "login` has written: mend that, or leave report.wandb out."
            ) from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step. Where wandb's own process is gone the run goes on without it: the other writers have the same."""
        if self._run is None:
            return
        try:
            with _answering(ANSWER_S):
                self._run.log(dict(metrics), step=step)
        except Exception as error:  # wandb has many names for it
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        folder, self._run = Path(self._run.dir).parent, None
        with suppress(Exception):
            self._teardown()  # or wandb would look for it once more in the end, and show a trace
        log.warning(
            "wandb's process on this machine is gone (%s: %s): the run goes on, and wandb has no more of it. What it had "
            "written by then can be sent with: wandb sync %s",
            type(error).__name__,
            error,
            folder,
        )

    def close(self, failed: bool = False) -> None:
        """Finish the run, as failed where it has; sends what is not yet sent, for as long as FINISH_S."""
        if self._run is None:
            return
        folder = Path(self._run.dir).parent
        try:
            with _answering(FINISH_S + ANSWER_S):
                self._run.finish(exit_code=int(failed))
        except TimeoutError:
            log.warning(
                "wandb's server did not take everything within %d s. What is left can be sent with: wandb sync %s",
                FINISH_S,
                folder,
            )
        except Exception as error:
            self._give_up(error)


@contextmanager
def _answering(longest_s: float) -> Iterator[None]:
    """Within, wandb's process on this machine answers in time, or is ended, so that who waits for it hears that it is gone.

    wandb itself knows no deadline there: of a process that is frozen, or waits for a disk, the run would never end.
    """

    def end() -> None:
        for each in psutil.Process().children():
            with suppress(psutil.Error):  # it has ended meanwhile
                if each.name() == WANDBS_PROCESS:
                    log.warning("wandb's process on this machine has not answered for %g s, and is ended", longest_s)
                    each.kill()

    late = threading.Timer(longest_s, end)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def _told(error: Exception) -> str:
    """What is wrong, of settings without their values: one of them is a key."""
    if not isinstance(error, ValidationError):
        return str(error).strip().rstrip(".") or type(error).__name__
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())


class Writers:
    """All writers of a run; a context manager. One whose disk fails stops the run; closing reaches every one of them."""

    def __init__(self, *writers: MetricWriter) -> None:
        self._writers = writers
        self._failed = False
        self._stack = ExitStack()
        for writer in reversed(writers):
            self._stack.callback(self._close, writer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None and not isinstance(error, StoppedError))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step, to everybody. Raises MegarlError where a name is not in the table of metrics, or a disk fails."""
        check_names(metrics)
        for writer in self._writers:
            writer.write(step, metrics)

    def close(self, failed: bool = False) -> None:
        """Close every writer, also where one of them fails; a second call does nothing. failed: see MetricWriter."""
        self._failed = failed
        self._stack.close()

    def _close(self, writer: MetricWriter) -> None:
        # A write that has failed is tried once more as its file is closed; that it fails again says less than the first did.
        with suppress(OSError) if self._failed else nullcontext():
            writer.close(self._failed)


def open_writers(
    folder: Path, recipe: AnyRecipe, *, resumed_step: int | None = None, recovered: bool = False
) -> Writers:
    """The writers that the recipe asks for, in the run's folder. resumed_step: the step that the run goes on after.

    recovered: the run goes on by itself after a death.
    """
    with ExitStack() as opened:
        # First what may be refused: where a run has begun, by its metrics, the same command is refused.
        last: list[MetricWriter] = []
        if recipe.report.wandb is not None:
            config = recipe.model_dump(mode="json")
            last.append(WandbWriter(folder, recipe.report.wandb.project, recipe.run.name, config, recovered=recovered))
            opened.callback(last[0].close, failed=True)
        if (path := recipe.report.writer) is not None:
            last.append(OwnWriter(path, folder, recipe.model_dump(mode="json"), resumed_step, recovered=recovered))
            opened.callback(last[-1].close, failed=True)
        writers: list[MetricWriter] = [JsonlWriter(folder / METRICS_FILE, resumed_step)]
        opened.callback(writers[0].close)
        if recipe.report.tensorboard:
            writers.append(TensorBoardWriter(folder / TENSORBOARD_FOLDER, resumed_step))
        opened.pop_all()
    return Writers(*writers, *last)
