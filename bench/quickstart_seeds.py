"""The quickstart on several seeds: model, task, warm start and GRPO are made anew from each. One command:

    python -m bench.quickstart_seeds

Every number is read from the runs' own metrics.jsonl; seconds are wall time of the commands, starts included.
Writes a table, bench/results/quickstart_seeds.json and bench/results/quickstart_seeds.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.support.measure import RESULTS, write
from bench.support.quickstart import ROOT, accuracy, metrics, train, warm_start


def run_seed(seed: int, folder: Path) -> dict[str, Any]:
    """Everything from nothing, in `folder`."""
    sft_s = warm_start(seed, folder)
    grpo_s = train("quickstart", "grpo", seed, folder, [])
    rows = metrics(folder / "grpo")
    held_out = accuracy(rows)
    steps = [row for row in rows if row["step"]]
    return {
        "seed": seed,
        "accuracy": held_out,
        "before": held_out[0],
        "after": held_out[max(held_out)],
        "reward": {row["step"]: row["reward/mean"] for row in steps},
        "logprob_diff_max": max(row["rollout/logprob_diff_max"] for row in steps),
        "probe_diff_max": max(row["sync/probe_diff_max"] for row in rows),
        "driver_fraction_max": max(row["perf/driver_fraction"] for row in steps),
        "sft_s": sft_s,
        "grpo_s": grpo_s,
    }


def draw(results: list[dict[str, Any]], target: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for result in results:
        left.plot(
            list(result["accuracy"]), list(result["accuracy"].values()), marker="o", label=f"seed {result['seed']}"
        )
        right.plot(list(result["reward"]), list(result["reward"].values()), label=f"seed {result['seed']}")
    left.axhline(0.5, color="grey", linestyle=":", linewidth=1)
    left.axhline(0.9, color="grey", linestyle=":", linewidth=1)
    for axes, title in ((left, "held-out accuracy, greedy, 200 prompts"), (right, "reward in training")):
        axes.set(title=title, xlabel="step", ylim=(-0.02, 1.04))
        axes.grid(alpha=0.25)
        axes.legend(loc="lower right")
    figure.savefig(target, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "quickstart_seeds", help="where the runs go")
    options = parser.parse_args()
    results = []
    for seed in options.seeds:
        results.append(run_seed(seed, options.folder.resolve() / f"seed-{seed}"))
        Console().print(f"seed {seed}: {results[-1]['before']:.3f} -> {results[-1]['after']:.3f}", highlight=False)
    table = Table(title="quickstart, held-out accuracy before and after GRPO")
    for column in ("seed", "before", "after", "SFT", "GRPO", "rollout-trainer diff", "probe diff", "driver"):
        table.add_column(column, justify="right")
    for row in results:
        table.add_row(
            *(str(row["seed"]), f"{row['before']:.3f}", f"{row['after']:.3f}"),
            *(f"{row['sft_s']:.0f} s", f"{row['grpo_s']:.0f} s", f"{row['logprob_diff_max']:.1e}"),
            *(f"{row['probe_diff_max']:.1e}", f"{row['driver_fraction_max']:.2%}"),
        )
    Console().print(table)
    write("quickstart_seeds", {"runs": results}, None)
    draw(results, RESULTS / "quickstart_seeds.png")


if __name__ == "__main__":
    main()
