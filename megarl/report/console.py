"""A run on the console: a bar with the phase and the time left, a line a step, a table at the end.

Where the output is not a terminal (a file, a scheduler's log), the same lines come plain, without the bar.
"""

from __future__ import annotations

import errno
import os
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from megarl.core.log import get_logger, visible
from megarl.core.metrics import PHASES, format_value
from megarl.core.progress import Done
from megarl.core.timing import PhaseTimer
from megarl.report.history import read_history
from megarl.report.summary import duration, summary_table

log = get_logger(__name__)

# What a line shows, in this order, where the step has it: label, metrics to look for (the first found), width.
FIELDS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("loss", ("sft/loss", "rm/loss", "dpo/loss", "kto/loss"), 7),
    ("reward", ("reward/mean",), 6),
    ("acc", ("eval/accuracy", "rm/eval_accuracy", "dpo/eval_accuracy", "kto/eval_accuracy"), 5),
    ("kl", ("actor/kl_loss", "actor/approx_kl"), 9),
    ("len", ("rollout/response_len_mean",), 6),
    ("grad", ("actor/grad_norm", "rm/grad_norm", "dpo/grad_norm", "kto/grad_norm"), 7),
    ("tok/s", ("perf/tokens_per_s",), 6),
)
HIGHLIGHTED = ("reward", "acc")
FAILURE_SHOWN = 200  # characters
# Steps that are quicker share a line: hundreds of lines a minute are read by nobody, and metrics.jsonl has them all.
SECONDS_A_LINE = 1.0
# Speed is the mean over this long: single steps differ (evaluations, checkpoints), and take hours in large runs.
SPEED_WINDOW_S = 7 * 24 * 3600.0
# What a full disk, a quota, and a terminal that was closed answer.
OUTPUT_GONE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
# Where there is no terminal, how far a long phase is stands in a line of its own that often.
PROGRESS_LINE_S = 60.0


class Output(Console):
    """What a run prints to. Where nothing takes it any more, the run goes on unseen: it has other records.

    Whoever reads it may have ended (tee, a pager), the terminal may be closed, and the disk of the file that it goes into full.
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Where rich writes, the bar too; what the output's disk or terminal refuses ends the output alone."""
        try:
            super().__exit__(kind, error, trace)
        except OSError as refused:
            if refused.errno not in OUTPUT_GONE:
                raise
            self._go_on_unseen(f"the output cannot be written any more ({refused.strerror})")

    def on_broken_pipe(self) -> None:
        """Nobody reads any more; rich would end the process, and say nothing of it."""
        self._go_on_unseen("nobody reads the output any more")

    def _go_on_unseen(self, why: str) -> None:
        """Print nothing more, here and elsewhere in this process."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)
        log.warning("%s: the run goes on without it", why)


class RunConsole:
    """Progress of one run; a context manager, so that the terminal is restored whatever happens."""

    def __init__(self, name: str, steps: int, out: Console) -> None:
        self._out = out
        self._steps = steps
        self._seconds: list[float] = []
        self._unseen_s = 0.0  # seconds of steps since the last line
        self._began = False
        self._shown: set[str] = set()  # labels that a line of this run has had
        self._unseen_failure = ""  # of steps since the last line
        self._first_failure = ""  # of the run, with its step
        self._phase, self._step, self._phase_began, self._told = "", 0, 0.0, 0.0
        self._found: Done | None = None  # when the phase first told of it: what was done by then took no time of it
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("[cyan]{task.fields[phase]}"),
            TimeElapsedColumn(),
            TextColumn("[dim]left"),
            TimeRemainingColumn(),
            console=out,
            transient=True,
            disable=not out.is_terminal,
            speed_estimate_period=SPEED_WINDOW_S,
        )
        self._task = self._progress.add_task(name, total=steps, phase="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def phase(self, step: int | None, phase: str | None) -> None:
        """A phase begins, or ends with None: what PhaseTimer calls."""
        if step is not None and not self._began:
            # A resumed run must not count the steps of its forerunner as its own speed.
            self._progress.reset(self._task, total=self._steps, completed=step - 1, phase="")
            self._began = True
        self._progress.update(self._task, phase=phase or "")
        self._phase, self._step, self._phase_began = phase or "", step or 0, time.monotonic()
        self._told = self._phase_began
        self._found = None
        if not self._out.is_terminal and step is None and phase is not None:
            self._out.print(f"{phase} begins ({PHASES[phase]})", highlight=False)

    def progress(self, done: Done) -> None:
        """How far the phase's operation is, with the time left: in the bar; without a terminal, a line a minute."""
        now = time.monotonic()
        if self._found is None or done.total != self._found.total or done.count < self._found.count:
            self._found = done
        more = done.count - self._found.count
        left = (now - self._phase_began) * (done.total - done.count) / more if more else None
        words = f"{self._phase}: {done}" + (f", {duration(left)} left" if left is not None else "")
        self._progress.update(self._task, phase=words)
        if not self._out.is_terminal and now - self._told >= PROGRESS_LINE_S:
            self._told = now
            self._out.print(f"step {self._step}, {words}" if self._step else words, highlight=False)

    def step(self, number: int, metrics: Mapping[str, float], failure: str = "") -> None:
        """A step is done, or, for step 0, what was measured before the first. A line a step, at most one a second.

        failure: what is said of samples without a response or a grade, at the end of the line.
        """
        if failure:
            failure = f"at step {number}, {visible(' '.join(failure.split()))}"
            self._unseen_failure = self._unseen_failure or failure
            self._first_failure = self._first_failure or failure
        self._unseen_s += metrics.get("perf/step_s", SECONDS_A_LINE)
        if self._unseen_s >= SECONDS_A_LINE or not self._seconds or number == self._steps or "perf/eval_s" in metrics:
            self._out.print(self._line(number, metrics), soft_wrap=True, highlight=False)
            self._unseen_s = 0.0
            self._unseen_failure = ""
        if number:
            self._seconds.append(metrics.get("perf/step_s", 0.0))
            self._progress.update(self._task, completed=number)

    def finish(self, timer: PhaseTimer, metrics_file: Path, *, export: Path, curve: Path) -> None:
        """Stop the bar and print the table of the whole run."""
        self._progress.stop()
        rows = read_history(metrics_file)
        self._out.print(
            summary_table(rows, timer.totals, timer.elapsed_s(), export, curve, failure=self._first_failure)
        )

    def _line(self, number: int, metrics: Mapping[str, float]) -> Text:
        width = len(str(self._steps))
        line = Text(f"{number:>{width}}/{self._steps}", style="bold")
        for label, names, field_width in FIELDS:
            name = next((name for name in names if name in metrics), None)
            if name is not None:
                self._shown.add(label)
                line.append(f"  {label} ", style="dim")
                line.append(
                    f"{format_value(name, metrics[name]):<{field_width}}",
                    style="green" if label in HIGHLIGHTED else "not bold",
                )
            elif label in self._shown:
                # What not every step has keeps its place, so that the columns stay columns.
                line.append(" " * (len(label) + field_width + 3))
        if "perf/step_s" in metrics:
            line.append(f"  {format_value('perf/step_s', metrics['perf/step_s'])} s", style="not bold")
            line.append(f" ({self._phases(metrics)})", style="dim")
        left = self._left_after(number, metrics)
        if left is not None and not self._out.is_terminal:
            line.append(f"  left {duration(left)}", style="dim")
        line.rstrip()
        if self._unseen_failure:
            shown = textwrap.shorten(self._unseen_failure, FAILURE_SHOWN, placeholder=" ...")
            line.append(f"  {shown}", style="yellow")
        return line

    def _left_after(self, number: int, metrics: Mapping[str, float]) -> float | None:
        if number == 0 or "perf/step_s" not in metrics:
            return None
        seconds = [*self._seconds, metrics["perf/step_s"]]
        return sum(seconds) / len(seconds) * (self._steps - number)

    @staticmethod
    def _phases(metrics: Mapping[str, float]) -> str:
        spent = [(phase, metrics[f"perf/{phase}_s"]) for phase in PHASES if f"perf/{phase}_s" in metrics]
        return " ".join(f"{phase} {seconds:.1f}" for phase, seconds in spent if seconds >= 0.05)
