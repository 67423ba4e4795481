"""The quickstart on several seeds: model, task, warm start and GRPO are made anew from each. One command:

    python bench/quickstart_seeds.py

Every number is read from the runs' own metrics.jsonl; seconds are wall time of the commands, starts included.
Writes a table, bench/results/quickstart_seeds.json and bench/results/quickstart_seeds.png.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"


def call(*command: str) -> float:
    """Run a command in the repository's root; its seconds. Its output is shown when it fails."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} exited with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return time.monotonic() - began


def run_seed(seed: int, folder: Path) -> dict[str, Any]:
    """Everything from nothing, in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    call("tools/make_tiny_model.py", "--out", str(folder / "model"), "--seed", str(seed))
    call("tools/make_arithmetic.py", "--out", str(folder / "data"), "--seed", str(seed))
    common = [f"run.dir={folder}", f"run.seed={seed}"]
    sft_s = call(
        *("-m", "megarl", "sft", "recipes/quickstart_sft.yaml", *common, "run.name=sft"),
        *(f"model.path={folder}/model", f"data.train={folder}/data/sft.jsonl"),
    )
    grpo_s = call(
        *("-m", "megarl", "train", "recipes/quickstart.yaml", *common, "run.name=grpo", f"model.path={folder}/sft/hf"),
        *(f"data.train={folder}/data/train.jsonl", f"data.eval={folder}/data/eval.jsonl"),
    )
    rows = [json.loads(line) for line in (folder / "grpo" / "metrics.jsonl").read_text().splitlines()]
    accuracy = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    steps = [row for row in rows if row["step"]]
    return {
        "seed": seed,
        "accuracy": accuracy,
        "before": accuracy[0],
        "after": accuracy[max(accuracy)],
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
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "quickstart_seeds.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, RESULTS / "quickstart_seeds.png")


if __name__ == "__main__":
    main()
