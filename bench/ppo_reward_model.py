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


def ends(values: list[float]) -> dict[str, float]:
    """Means of the first and of the last steps."""
    return {"before": statistics.mean(values[:ENDS]), "after": statistics.mean(values[-ENDS:])}


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
    score, right_in_training = ends(scores), ends(right)
    held_out = accuracy(rows)
    result = {
        "score": score,
        "right_in_training": right_in_training,
        "held_out_accuracy": held_out,
        "scores": scores,
        "seconds": seconds,
    }
    table = Table(title=f"PPO against the reward model, {seconds:.0f} s")
    for column in ("", "before", "after"):
        table.add_column(column, justify="right")
    for name, both in (("score", score), ("right answers in training", right_in_training)):
        table.add_row(name, f"{both['before']:.3f}", f"{both['after']:.3f}")
    table.add_row("right answers, held out", f"{held_out[0]:.3f}", f"{held_out[max(held_out)]:.3f}")
    Console().print(table)
    write("ppo_reward_model", result, None)
    draw(steps, RESULTS / "ppo_reward_model.png")
    sys.exit(score["after"] <= score["before"])


if __name__ == "__main__":
    typer.run(main)
