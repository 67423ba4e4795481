"""The table that ends a run: before and after, tokens per second, seconds by phase, and where the results lie."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megarl.core.metrics import PHASES, format_value
from megarl.report.bottleneck import bottleneck
from megarl.report.history import Row, is_number, series

BEFORE_AND_AFTER = (
    ("reward", "reward/mean"),
    ("held-out accuracy", "eval/accuracy"),
    ("pairs the right way round, held out", "rm/eval_accuracy"),
    ("pairs the right way round, held out", "dpo/eval_accuracy"),
    ("answers on the right side, held out", "kto/eval_accuracy"),
    ("held-out reward", "eval/reward"),
    ("loss", "sft/loss"),
    ("loss", "rm/loss"),
    ("loss", "dpo/loss"),
    ("loss", "kto/loss"),
    ("response length, tokens", "rollout/response_len_mean"),
    ("entropy, nats", "actor/entropy"),
)
LARGEST = (
    ("rollout against trainer, log-prob", "rollout/logprob_diff_max"),
    ("weight sync's probe, log-prob", "sync/probe_diff_max"),
)
# Samples that were lost, over all steps.
LOST = (
    ("samples without a grade", "reward/failures"),
    ("samples that no server answered, or whose episode failed", "rollout/failed"),
    ("held-out samples without a grade", "eval/failures"),
)
# A rate, and the seconds that it was measured over: its mean is weighted by these.
RATES = (
    ("generation", "perf/rollout_tokens_per_s", "perf/generation_s"),
    ("training", "perf/train_tokens_per_s", "perf/update_s"),
    ("whole step", "perf/tokens_per_s", "perf/step_s"),
)


def duration(seconds: float) -> str:
    """Seconds for people: `8.4 s`, `3:05`, `2:03:04`."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def mean_rate(rows: list[Row], rate: str, seconds: str) -> float | None:
    """Mean of a rate over the steps, weighted by the seconds of each; None where no step has both."""
    pairs = [(row[rate], row[seconds]) for row in rows if row.get(rate) is not None and row.get(seconds)]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else None


def summary_table(
    rows: list[Row],
    totals: Mapping[str, float],
    elapsed_s: float,
    export: Path | None,
    curve: Path | None,
    *,
    failure: str = "",
) -> RenderableType:
    """rows: the run's history. totals: seconds by phase; elapsed_s: of this process, from its start.

    export, curve: None where they are not there. failure: what was said of the first samples without a grade.
    """
    places = [f"weights  {export}  (HF)"] if export else []
    places += [f"curve    {curve}"] if curve else []
    lost = [Text(f"failures {failure}", style="yellow")] if failure else []
    side = bottleneck(rows)
    return Group(_results(rows), _seconds(totals, elapsed_s), *([side] if side else []), *lost, Text("\n".join(places)))


def _results(rows: list[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("")
    for column in ("before", "after"):
        table.add_column(column, justify="right")
    for label, name in BEFORE_AND_AFTER:
        # What was measured and was no number, as the loss of a run that diverged, is not the last one that was.
        values = [float(row[name]) if is_number(row[name]) else math.nan for row in rows if name in row]
        if values:
            first = format_value(name, values[0]) if len(values) > 1 else "-"
            table.add_row(label, first, format_value(name, values[-1]))
    for label, name in LARGEST:
        _, values = series(rows, name)
        if values:
            table.add_row(f"{label}, largest difference", "", format_value(name, max(values)))
    for label, name in LOST:
        lost = sum(series(rows, name)[1])
        if lost:
            table.add_row(f"{label}, all steps", "", format_value(name, lost), style="yellow")
    for label, rate, seconds in RATES:
        mean = mean_rate(rows, rate, seconds)
        if mean is not None:
            table.add_row(f"{label}, tokens/s", "", f"{mean:,.0f}")
    return table


def _seconds(totals: Mapping[str, float], elapsed_s: float) -> Table:
    """Phases in the loop's order; what no phase covers is shown as well, so that the rows add up."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left")
    for column, justify in (("phase", "left"), ("total", "right"), ("share", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    spent = {phase: totals[phase] for phase in PHASES if phase in totals}
    spent["other"] = max(0.0, elapsed_s - sum(spent.values()))
    for phase, seconds in spent.items():
        table.add_row(phase, duration(seconds), f"{seconds / elapsed_s:.1%}" if elapsed_s > 0 else "-")
    table.add_section()
    table.add_row("all", duration(elapsed_s), "")
    return table
