"""Two games of several turns on several seeds: model, task, warm start and GRPO on episodes are made anew from each. One command:

    python -m bench.agents

Guess the number, and chains of operations with a calculator. Every number is read from the runs' own metrics.jsonl; seconds are
wall time of the commands, starts included. Each run is written down as it ends, beside those of other games and seeds that are
there: bench/results/agents.json and bench/results/agents.png; then a table.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.support.measure import RESULTS, write
from bench.support.quickstart import ROOT, accuracy, call, metrics

# Learned: from under the first to over the second, of all held-out games, within so many seconds.
BEFORE, AFTER, SECONDS = 0.3, 0.8, 600.0


@dataclass(frozen=True)
class Game:
    """recipe: of the GRPO run; that of its warm start has `_sft` behind it. maker: the module that writes its task."""

    title: str
    recipe: str
    maker: str


GAMES = {
    "guess": Game("guess the number", "quickstart_agent", "tools.make_guessing"),
    "calculator": Game("chains with a calculator", "quickstart_calculator", "tools.make_chains"),
}


def run_seed(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Everything from nothing, in `folder`."""
    game = GAMES[name]
    shutil.rmtree(folder, ignore_errors=True)
    common = (f"run.dir={folder}", f"run.seed={seed}")
    call(
        *("tools/make_tiny_model.py", "--out", f"{folder}/model", "--seed", str(seed)),
        *("--hidden-size", "128", "--heads", "4"),
    )
    call("-m", game.maker, "--out", f"{folder}/data", "--seed", str(seed))
    sft_s = call(
        *("-m", "megarl", "sft", f"recipes/{game.recipe}_sft.yaml", *common, "run.name=sft"),
        *(f"model.path={folder}/model", f"data.train={folder}/data/sft.jsonl"),
    )
    grpo_s = call(
        *("-m", "megarl", "train", f"recipes/{game.recipe}.yaml", *common, "run.name=grpo"),
        *(f"model.path={folder}/sft/hf", f"data.train={folder}/data/train.jsonl"),
        f"data.eval={folder}/data/eval.jsonl",
    )
    rows = metrics(folder / "grpo")
    held_out = accuracy(rows)
    steps = [row for row in rows if row["step"]]
    return {
        "game": name,
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
    """Episodes that succeed, held out and in training, and their turns: a row for each game."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    games = [name for name in GAMES if any(result["game"] == name for result in results)]
    figure = Figure(figsize=(12, 3.3 * len(games)), layout="constrained")
    FigureCanvasAgg(figure)
    for name, (held_out, training, turns) in zip(games, figure.subplots(len(games), 3, squeeze=False), strict=True):
        for result in (result for result in results if result["game"] == name):
            for axes, values, mark in (
                (held_out, result["accuracy"], "o"),
                (training, result["reward"], ""),
                (turns, result["turns"], ""),
            ):
                steps = [*map(int, values)]
                axes.plot(steps, [*values.values()], marker=mark, markersize=3, label=f"seed {result['seed']}")
        for axes, what in ((held_out, "held out"), (training, "in training")):
            axes.set(title=f"{GAMES[name].title}: success {what}", xlabel="step", ylim=(-0.02, 1.04))
            for height in (BEFORE, AFTER):
                axes.axhline(height, color="grey", linestyle=":", linewidth=1)
        turns.set(title="turns of an episode, mean", xlabel="step")
        turns.legend(fontsize=8)
        for axes in (held_out, training, turns):
            axes.grid(alpha=0.25)
    figure.savefig(target, dpi=100)


def show(results: list[dict[str, Any]]) -> None:
    """A line a run."""
    table = Table(title="episodes that succeed, held out, before and after GRPO")
    learned = f"learned (< {BEFORE} to > {AFTER} in {SECONDS:.0f} s)"
    for column in ("game", "seed", "before", "after", "SFT", "GRPO", "rollout-trainer diff", learned):
        table.add_column(column, justify="right")
    for row in results:
        done = row["before"] < BEFORE and row["after"] > AFTER and row["grpo_s"] < SECONDS
        table.add_row(
            *(row["game"], str(row["seed"]), f"{row['before']:.3f}", f"{row['after']:.3f}", f"{row['sft_s']:.0f} s"),
            *(f"{row['grpo_s']:.0f} s", f"{row['logprob_diff_max']:.1e}", "yes" if done else "NO"),
        )
    Console().print(table)


def keep(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Write a run down, and draw, beside all others that are there; what is there then, in order."""
    file = RESULTS / "agents.json"
    before = json.loads(file.read_text())["runs"] if file.exists() else []
    others = [other for other in before if (other["game"], other["seed"]) != (run["game"], run["seed"])]
    runs = sorted([*others, run], key=lambda run: ([*GAMES].index(run["game"]), run["seed"]))
    write("agents", {"runs": runs}, None)
    draw(runs, RESULTS / "agents.png")
    return runs


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"only these games; default: {', '.join(GAMES)}")] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="only these; default: 1, 2, 3")] = None,
    folder: Annotated[Path, typer.Option(help="where the runs go")] = ROOT / ".cache" / "bench_agents",
) -> None:
    """Train, tabulate, draw."""
    games, chosen = only or [*GAMES], seeds or [1, 2, 3]
    if unknown := sorted({*games} - {*GAMES}):
        raise typer.BadParameter(f"there is no game {unknown[0]}; there are {', '.join(GAMES)}")
    for name in games:
        for seed in chosen:
            run = run_seed(name, seed, folder.resolve() / f"{name}-{seed}")
            results = keep(run)
            typer.echo(f"{name}, seed {seed}: {run['before']:.3f} -> {run['after']:.3f}")
    show(results)


if __name__ == "__main__":
    typer.run(main)
