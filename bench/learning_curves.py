"""Do the algorithms learn? Each one on the quickstart's task, from the same warm start. One command:

    python -m bench.learning_curves

PPO with its critic on three seeds; GRPO, RLOO, REINFORCE++, GSPO and DAPO on one. Every number is read from the runs' own
metrics.jsonl; seconds are wall time of the commands, starts included, without the warm start, which all share.
`--only` makes some of the curves anew and keeps the others.
Writes a table, bench/results/learning_curves.json and bench/results/learning_curves.png.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.support.measure import write
from bench.support.quickstart import ROOT, accuracy, metrics, train, warm_start

RESULTS = ROOT / "bench" / "results"
# Name of a curve -> recipe and seeds.
CURVES = {
    "PPO": ("quickstart_ppo", (1, 2, 3)),
    "GRPO": ("quickstart", (1,)),
    "RLOO": ("quickstart_rloo", (1,)),
    "REINFORCE++": ("quickstart_reinforce_pp", (1,)),
    "GSPO": ("quickstart_gspo", (1,)),
    "DAPO": ("quickstart_dapo", (1,)),
}
BEFORE, AFTER, SECONDS = 0.5, 0.9, 600  # what a run has to begin below, end above, and take less than


def run(name: str, recipe: str, seed: int, folder: Path) -> dict[str, Any]:
    """One curve, from the seed's warm start."""
    seconds = train(recipe, recipe, seed, folder, [])
    rows = metrics(folder / recipe)
    held_out = accuracy(rows)
    steps = [row for row in rows if row["step"]]
    return {
        "algorithm": name,
        "seed": seed,
        "accuracy": held_out,
        "reward": {row["step"]: row["reward/mean"] for row in steps},
        "explained_variance": steps[-1].get("critic/explained_variance"),
        "before": held_out[0],
        "after": held_out[max(held_out)],
        "seconds": seconds,
    }


def draw(results: list[dict[str, Any]], target: Path) -> None:
    """Held-out accuracy and training reward by step, one line a run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for result in results:
        label = f"{result['algorithm']}, seed {result['seed']}"
        style = "--" if result["seed"] > 1 else "-"
        for axes, values, mark in ((left, result["accuracy"], "o"), (right, result["reward"], "")):
            axes.plot([*map(int, values)], [*values.values()], style, marker=mark, markersize=3, label=label)
    for axes, title in ((left, "held-out accuracy, greedy, 200 prompts"), (right, "reward in training")):
        axes.set(title=title, xlabel="step", ylim=(-0.02, 1.04))
        axes.grid(alpha=0.25)
        for height in (BEFORE, AFTER):
            axes.axhline(height, color="grey", linestyle=":", linewidth=1)
    right.legend(loc="lower right", fontsize=8)
    figure.savefig(target, dpi=110)


def main(
    only: Annotated[list[str] | None, typer.Option(help="only these curves; default: all")] = None,
    folder: Annotated[Path, typer.Option(help="where the runs go")] = ROOT / ".cache" / "learning_curves",
    anew: Annotated[bool, typer.Option(help="make the warm starts again where they are there")] = True,
) -> None:
    """Train, tabulate, draw."""
    chosen = {name: CURVES[name] for name in only or CURVES}
    for seed in sorted({seed for _, seeds in chosen.values() for seed in seeds}):
        if anew or not (folder / f"seed-{seed}" / "sft" / "hf").exists():
            warm_start(seed, folder.resolve() / f"seed-{seed}")
    for name, (recipe, seeds) in chosen.items():
        for seed in seeds:
            last = run(name, recipe, seed, folder.resolve() / f"seed-{seed}")
            typer.echo(f"{name}, seed {seed}: {last['before']:.3f} -> {last['after']:.3f} in {last['seconds']:.0f} s")
            results = keep(last)
    show(results)
    draw(results, RESULTS / "learning_curves.png")


def keep(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Put a curve among those that are there, in the place of its last one; all of them, in the order of CURVES."""
    target = RESULTS / "learning_curves.json"
    results = json.loads(target.read_text())["curves"] if target.exists() else []
    key = ("algorithm", "seed")
    results = [each for each in results if [each[name] for name in key] != [result[name] for name in key]]
    # Steps are numbers here and text in a file: as a file has it.
    results = sorted(
        [*results, json.loads(json.dumps(result))],
        key=lambda each: (list(CURVES).index(each["algorithm"]), each["seed"]),
    )
    write("learning_curves", {"curves": results}, None)
    return results


def show(results: list[dict[str, Any]]) -> None:
    """A line a curve."""
    table = Table(title="the quickstart's task, held-out accuracy")
    for column in ("algorithm", "seed", "before", "after", "seconds", f"learned (<= {BEFORE} to >= {AFTER})"):
        table.add_column(column, justify="right")
    for row in results:
        learned = row["before"] <= BEFORE and row["after"] >= AFTER and row["seconds"] < SECONDS
        table.add_row(
            *(row["algorithm"], str(row["seed"]), f"{row['before']:.3f}", f"{row['after']:.3f}"),
            *(f"{row['seconds']:.0f}", "yes" if learned else "NO"),
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
