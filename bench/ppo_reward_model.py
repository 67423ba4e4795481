"""Does PPO raise the score of a reward model that megarl trained, and does the task itself get better? One command:

    python -m bench.reward_model && python -m bench.ppo_reward_model

PPO with a critic (recipes/quickstart_ppo_rm.yaml) from the warm start of bench/reward_model, against its reward model alone;
the rule, which knows the right answers, grades beside it without weight. Every number is read from the run's metrics.jsonl.
Writes a table, bench/results/ppo_reward_model.json and bench/results/ppo_reward_model.png; exit code 0 only where the score
of the last five steps is above that of the first five.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.support.measure import write
from bench.support.quickstart import ROOT, accuracy, call, metrics, train

RESULTS = ROOT / "bench" / "results"
RECIPE, NAME = "quickstart_ppo_rm", "ppo_rm"
ENDS = 5  # steps at each end of a run that are compared


def draw(rows: list[dict[str, Any]], target: Path) -> None:
    """Score in training, and what the rule says of the same samples."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps = [row["step"] for row in rows]
    left.plot(steps, [row["reward/model_score"] for row in rows])
    left.set(title="score of the reward model, in training", xlabel="step")
    right.plot(steps, [row["reward/by/math/mean"] for row in rows])
    right.set(title="share of right answers, which nothing rewards", xlabel="step", ylim=(-0.02, 1.04))
    for axes in (left, right):
        axes.grid(alpha=0.25)
    figure.savefig(target, dpi=110)


def main(
    folder: Annotated[Path, typer.Option(help="of bench/reward_model")] = ROOT / ".cache" / "reward_model",
    seed: Annotated[int, typer.Option(help="of the run")] = 1,
) -> None:
    """Train, tabulate, draw."""
    folder = folder.resolve()
    call("tools/make_arithmetic.py", "--out", str(folder / "data"), "--seed", str(seed))
    seconds = train(RECIPE, NAME, seed, folder, [f"reward_model.path={folder}/rm/hf"])
    rows = metrics(folder / NAME)
    steps = [row for row in rows if row["step"]]
    scores, right = ([row[name] for row in steps] for name in ("reward/model_score", "reward/by/math/mean"))
    result = {
        "score": {"before": statistics.mean(scores[:ENDS]), "after": statistics.mean(scores[-ENDS:])},
        "right_in_training": {"before": statistics.mean(right[:ENDS]), "after": statistics.mean(right[-ENDS:])},
        "held_out_accuracy": accuracy(rows),
        "scores": scores,
        "seconds": seconds,
    }
    table = Table(title=f"PPO against the reward model, {seconds:.0f} s")
    for column in ("", "before", "after"):
        table.add_column(column, justify="right")
    for name, ends in (("score", result["score"]), ("right answers in training", result["right_in_training"])):
        table.add_row(name, f"{ends['before']:.3f}", f"{ends['after']:.3f}")
    held_out = result["held_out_accuracy"]
    table.add_row("right answers, held out", f"{held_out[0]:.3f}", f"{held_out[max(held_out)]:.3f}")
    Console().print(table)
    write("ppo_reward_model", result, None)
    draw(steps, RESULTS / "ppo_reward_model.png")
    sys.exit(result["score"]["after"] <= result["score"]["before"])


if __name__ == "__main__":
    typer.run(main)
