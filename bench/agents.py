"""The guessing game on several seeds: model, games, warm start and GRPO on episodes are made anew from each. One command:

    python -m bench.agents

Every number is read from the runs' own metrics.jsonl; seconds are wall time of the commands, starts included.
Writes a table, bench/results/agents.json and bench/results/agents.png.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.support.quickstart import ROOT, accuracy, call, metrics

RESULTS = Path(__file__).resolve().parent / "results"
# Learned: from under the first to over the second, of all held-out games, within so many seconds.
BEFORE, AFTER, SECONDS = 0.3, 0.8, 600.0


def run_seed(seed: int, folder: Path) -> dict[str, Any]:
    """Everything from nothing, in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    common = (f"run.dir={folder}", f"run.seed={seed}")
    call(
        *("tools/make_tiny_model.py", "--out", f"{folder}/model", "--seed", str(seed)),
        *("--hidden-size", "128", "--heads", "4"),
    )
    call("-m", "tools.make_guessing", "--out", f"{folder}/data", "--seed", str(seed))
    sft_s = call(
        *("-m", "megarl", "sft", "recipes/quickstart_agent_sft.yaml", *common, "run.name=sft"),
        *(f"model.path={folder}/model", f"data.train={folder}/data/sft.jsonl"),
    )
    grpo_s = call(
        *("-m", "megarl", "train", "recipes/quickstart_agent.yaml", *common, "run.name=grpo"),
        *(f"model.path={folder}/sft/hf", f"data.train={folder}/data/train.jsonl"),
        f"data.eval={folder}/data/eval.jsonl",
    )
    rows = metrics(folder / "grpo")
    held_out = accuracy(rows)
    steps = [row for row in rows if row["step"]]
    return {
        "seed": seed,
        "accuracy": held_out,
        "before": held_out[0],
        "after": held_out[max(held_out)],
        "reward": {row["step"]: row["reward/mean"] for row in steps},
        "turns": {row["step"]: row["agent/turns_mean"] for row in steps},
        "logprob_diff_max": max(row["rollout/logprob_diff_max"] for row in steps),
        "sft_s": sft_s,
        "grpo_s": grpo_s,
    }


def draw(results: list[dict[str, Any]], target: Path) -> None:
    """Games won, held out and in training."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for result in results:
        for axes, values, mark in ((left, result["accuracy"], "o"), (right, result["reward"], "")):
            steps = [*map(int, values)]
            axes.plot(steps, [*values.values()], marker=mark, markersize=3, label=f"seed {result['seed']}")
    for axes, title in ((left, "guess the number: held-out games won"), (right, "games won in training")):
        axes.set(title=title, xlabel="step", ylim=(-0.02, 1.04))
        axes.grid(alpha=0.25)
        for height in (BEFORE, AFTER):
            axes.axhline(height, color="grey", linestyle=":", linewidth=1)
    right.legend(loc="lower right", fontsize=8)
    figure.savefig(target, dpi=110)


def show(results: list[dict[str, Any]]) -> None:
    """A line a seed."""
    table = Table(title="guess the number, held-out games won before and after GRPO on episodes")
    learned = f"learned (< {BEFORE} to > {AFTER} in {SECONDS:.0f} s)"
    for column in ("seed", "before", "after", "SFT", "GRPO", "rollout-trainer diff", learned):
        table.add_column(column, justify="right")
    for row in results:
        done = row["before"] < BEFORE and row["after"] > AFTER and row["grpo_s"] < SECONDS
        table.add_row(
            *(str(row["seed"]), f"{row['before']:.3f}", f"{row['after']:.3f}", f"{row['sft_s']:.0f} s"),
            *(f"{row['grpo_s']:.0f} s", f"{row['logprob_diff_max']:.1e}", "yes" if done else "NO"),
        )
    Console().print(table)


def main(
    seeds: Annotated[list[int] | None, typer.Option(help="only these; default: 1, 2, 3")] = None,
    folder: Annotated[Path, typer.Option(help="where the runs go")] = ROOT / ".cache" / "bench_agents",
) -> None:
    """Train, tabulate, draw."""
    results = []
    for seed in seeds or [1, 2, 3]:
        results.append(run_seed(seed, folder.resolve() / f"seed-{seed}"))
        typer.echo(f"seed {seed}: {results[-1]['before']:.3f} -> {results[-1]['after']:.3f}")
    show(results)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "agents.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, RESULTS / "agents.png")


if __name__ == "__main__":
    typer.run(main)
