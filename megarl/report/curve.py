"""A run as a picture: its metrics over the steps, drawn from metrics.jsonl. What a run did not measure is not drawn."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megarl.core.metrics import METRICS, PHASES
from megarl.report.history import Row, read_history, series

# Okabe and Ito's colours: told apart by everybody.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
)
# Of as many phases as a step can have, none twice.
PHASE_COLORS = (
    *(BLUE, SKY, PURPLE, YELLOW, ORANGE, GREEN, RED, "#8C6D31"),
    *("#332288", "#882255", "#999933", "#44AA99", "#555555"),
)
MOST_BARS = 100  # steps; matplotlib draws each bar by itself, and takes minutes for a long run's
INK, FAINT = "#333333", "#DDDDDD"
COLUMNS = 3
CURVE_FILE = "curve.png"
# Inches. matplotlib would find out what fits by drawing everything once more, and take as long for it again.
WIDTH, HEIGHT = 5.3, 3.8  # of a panel with what is around it
LEFT, RIGHT, ABOVE, BELOW = 0.75, 0.5, 0.35, 1.35  # of its axes: tick labels, title, and a legend of five lines
TITLE = 0.4
LONGEST_NAME = 80  # characters of a run's name that stand above two columns of panels


@dataclass(frozen=True)
class Line:
    """One metric in a panel."""

    name: str
    label: str
    color: str
    marker: str | None = None
    right: bool = False  # on an axis of its own


@dataclass(frozen=True)
class Panel:
    """One part of the picture; drawn where the run has one of its lines."""

    title: str
    lines: tuple[Line, ...]
    log: bool = False
    unit_range: bool = False  # shows 0 to 1 whole
    zero: bool = False  # shows 0


PANELS = (
    Panel(
        "Reward and held-out accuracy",
        (Line("reward/mean", "reward", BLUE), Line("eval/accuracy", "held-out accuracy", RED, "o")),
        unit_range=True,
    ),
    Panel(
        "Loss of supervised training",
        tuple(
            Line(f"{group}/{name}", f"{label} rows", color, marker)
            for group in ("sft", "rm", "dpo", "kto")
            for name, label, color, marker in (("loss", "training", BLUE, None), ("eval_loss", "held-out", RED, "o"))
        ),
        zero=True,
    ),
    Panel(
        "Pairs the right way round, labelled answers on the right side",
        tuple(
            Line(f"{group}/{name}", f"{label} rows", color, marker)
            for group in ("rm", "dpo", "kto")
            for name, label, color, marker in (
                ("accuracy", "training", BLUE, None),
                ("eval_accuracy", "held-out", RED, "o"),
            )
        ),
        unit_range=True,
    ),
    Panel(
        "Rollout against trainer, |log-prob difference|, nats",
        (Line("rollout/logprob_diff_max", "largest", RED), Line("rollout/logprob_diff_mean", "mean", BLUE)),
        log=True,
    ),
    Panel(
        "KL and entropy, nats",
        (
            Line("actor/kl_loss", "KL to the reference", BLUE),
            Line("actor/approx_kl", "KL of the update", SKY),
            Line("actor/entropy", "entropy (right)", ORANGE, right=True),
        ),
        zero=True,
    ),
    Panel(
        "Response length, tokens",
        (Line("rollout/response_len_max", "longest", SKY), Line("rollout/response_len_mean", "mean", BLUE)),
        zero=True,
    ),
    Panel(
        "Gradient norm and learning rate",
        tuple(
            line
            for group in ("actor", "rm", "dpo", "kto")
            for line in (
                Line(f"{group}/grad_norm", "gradient norm", BLUE),
                Line(f"{group}/lr", "learning rate (right)", ORANGE, right=True),
            )
        ),
        zero=True,
    ),
)  # fmt: skip


def draw_curve(metrics_file: Path, target: Path) -> None:
    """Draw the run's metrics into `target` (PNG). Raises UserError as read_history does."""
    rows = read_history(metrics_file)
    drawings: list[Callable[[Any], None]] = []
    for panel in PANELS:
        if any(series(rows, line.name)[0] for line in panel.lines):
            drawings.append(partial(_draw_panel, panel=panel, rows=rows))
    if any("perf/step_s" in row for row in rows):
        drawings.append(partial(_draw_phases, rows=rows))
    name = metrics_file.resolve().parent.name
    name = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}\N{HORIZONTAL ELLIPSIS}"
    _save(drawings, f"{name}, {rows[-1]['step'] if rows else 0} steps", target)


def _save(drawings: list[Callable[[Any], None]], title: str, target: Path) -> None:
    if not os.access(os.path.expanduser("~"), os.W_OK):
        # matplotlib would make a folder of its own where the run's temporary files are, and miss it when Python ends.
        os.environ.setdefault("MPLCONFIGDIR", str(Path(tempfile.gettempdir()) / "matplotlib"))
    # Figure without pyplot: no window system, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_rows = max(1, -(-len(drawings) // COLUMNS))
    width, height = WIDTH * COLUMNS, HEIGHT * num_rows + TITLE
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    figure.text(LEFT / width, 1 - TITLE / height, title, va="bottom", fontsize=14, fontweight="bold", color=INK)
    for number, draw in enumerate(drawings):
        row, column = divmod(number, COLUMNS)
        low = HEIGHT * (num_rows - 1 - row) + BELOW
        left, across, up = WIDTH * column + LEFT, WIDTH - LEFT - RIGHT, HEIGHT - ABOVE - BELOW
        draw(figure.add_axes((left / width, low / height, across / width, up / height)))
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_name(f".{target.name}")  # it has its name once it is whole
    try:
        figure.savefig(half, dpi=110, facecolor="white", format="png")
        half.replace(target)
    except OSError:
        with suppress(OSError):
            half.unlink()
        raise


def _dress(axes: Any, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel("step", fontsize=9, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, labelsize=9, colors=INK)


def _draw_panel(axes: Any, panel: Panel, rows: list[Row]) -> None:
    right: Any = None
    handles = []
    for line in panel.lines:
        assert line.name in METRICS, line.name
        steps, values = series(rows, line.name)
        if not steps:
            continue
        if line.right and right is None:
            right = axes.twinx()
            right.spines[["top", "right", "left"]].set_visible(False)
            right.tick_params(length=0, labelsize=9, colors=line.color)
            right.ticklabel_format(axis="y", scilimits=(-3, 4))
        # A lone point has no line: it needs a marker to be seen.
        marker = line.marker or ("o" if len(steps) == 1 else None)
        place = right if line.right else axes
        handles += place.plot(
            steps, values, color=line.color, label=line.label, marker=marker, markersize=4.5, linewidth=1.8
        )
    _dress(axes, panel.title)
    axes.ticklabel_format(axis="y", scilimits=(-3, 4))
    if panel.log:
        _whole_decades(axes, [value for line in panel.lines for value in series(rows, line.name)[1] if value > 0])
    if panel.unit_range and all(0 <= value <= 1 for line in panel.lines for value in series(rows, line.name)[1]):
        axes.set_ylim(-0.03, 1.03)
    for place in (axes, right) if panel.zero else ():
        if place is not None and place.get_ylim()[0] > 0:
            place.set_ylim(bottom=0)
    _legend(axes, handles=handles)


def _draw_phases(axes: Any, rows: list[Row]) -> None:
    """Seconds of each step as a bar, or of many as areas, cut by phase; what no phase covers is grey."""
    steps = [row["step"] for row in rows if row.get("perf/step_s") is not None]
    totals = [float(row["perf/step_s"]) for row in rows if row.get("perf/step_s") is not None]
    base = [0.0] * len(steps)
    shown = [phase for phase in PHASES if any(row.get(f"perf/{phase}_s") for row in rows)]

    def stack(heights: list[float], label: str, color: str) -> list[float]:
        tops = [low + height for low, height in zip(base, heights, strict=True)]
        if len(steps) < MOST_BARS:
            axes.bar(steps, heights, 0.85, bottom=base, label=label, color=color)
        else:
            axes.fill_between(steps, base, tops, step="mid", label=label, color=color, linewidth=0)
        return tops

    for phase, color in zip(shown, PHASE_COLORS, strict=False):
        heights = [float(row.get(f"perf/{phase}_s") or 0.0) for row in rows if row.get("perf/step_s") is not None]
        base = stack(heights, phase, color)
    stack([max(0.0, total - low) for total, low in zip(totals, base, strict=True)], "other", "#BBBBBB")
    _dress(axes, "Seconds of a step, by phase")
    _legend(axes)


def _legend(axes: Any, **options: Any) -> None:
    """Below the panel, where no line can pass under it."""
    axes.legend(
        **options,
        **{
            "loc": "upper left",
            "bbox_to_anchor": (-0.02, -0.16),
            "ncols": 3,
            "columnspacing": 1.2,
            "handlelength": 1.5,
        },
        **{"fontsize": 9, "frameon": False, "labelcolor": INK},
    )


def _whole_decades(axes: Any, values: list[float]) -> None:
    """A logarithmic axis from a power of ten to a power of ten; linear where nothing is above 0."""
    from matplotlib.ticker import NullFormatter

    if not values:
        return
    axes.set_yscale("log")
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    axes.set_ylim(10.0**low, 10.0 ** max(high, low + 1))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="minor", length=0)
