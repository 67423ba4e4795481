"""Seconds from `megarl submit` to the first token of the first rollout, over three nodes of a real SLURM, part by part.

    python -m bench.submit

The nodes are network namespaces of this machine and share its cores: what each part costs here is mostly importing, three
or more times at once. The run is tiny, two ranks and a server on a node each, and its responses are one token long: the end
of the first rollout is its first token. Needs root and the packages of tests/support/install_slurm.sh.
"""

from __future__ import annotations

import argparse
import json
import re
import select
import statistics
import sys
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from bench.support.measure import write
from tests.end_to_end.harness import RECIPE
from tests.support.slurm_cluster import SlurmCluster, slurm_cluster
from tools.make_arithmetic import make_arithmetic
from tools.make_tiny_model import make_tiny_model

LIMIT_S = 90.0
JOB_S = 240.0
OVERRIDES = (
    "cluster.devices=2",
    "data.eval=null",
    "rollout.max_response_tokens=1",
    "train.steps=1",
    "algorithm.kl_coef=0",
)
PARTS = {
    "check and sbatch": "`megarl submit`: interpreter, checks of the recipe, its data and model, sbatch",
    "queue": "until SLURM has started the job's script",
    "ray": "Ray up on three nodes, from srun to the last node's word",
    "driver": "interpreter and checks of the driver, until it joins Ray",
    "start": "checks of the nodes, servers and ranks up, models loaded, first verified weight sync",
    "rollout": "first requests to the end of one-token responses",
}


def measure(cluster: SlurmCluster, folder: Path, name: str) -> dict[str, float]:
    """One run's seconds by part."""
    run = folder / "runs" / name
    samples = run / "samples" / "step_000001.jsonl"
    begun = time.time()
    words = (
        str(folder / "recipe.yaml"),
        f"run.name={name}",
        *OVERRIDES,
        "--slurm",
        "--nodes=3",
        f"--temp={cluster.disk}",
    )
    done = cluster.megarl("submit", *words)
    assert done.returncode == 0, done.stderr
    submitted = time.time()
    end = time.monotonic() + JOB_S
    while not _finished(run):
        left = cluster.run("squeue", "--noheader").stdout.strip()
        assert left and time.monotonic() < end, cluster.megarl("logs", str(run)).stdout
        select.select([], [], [], 1.0)
    events = {
        each["event"]: each["time"]
        for each in map(json.loads, (run / "launch" / "events.jsonl").read_text().splitlines())
    }
    line = re.search(r"^(\S+ \S+) INFO .*run id", (run / "logs" / "driver.log").read_text(), re.MULTILINE)
    assert line
    joining = datetime.strptime(line[1], "%Y-%m-%d %H:%M:%S").timestamp()
    [step] = [row for row in _metrics(run) if row["step"] == 1]
    first = samples.stat().st_mtime
    times = [begun, submitted, events["started"], events["nodes ready"], joining, first - step["perf/rollout_s"], first]
    return {part: later - earlier for part, (earlier, later) in zip(PARTS, pairwise(times), strict=True)}


def _metrics(run: Path) -> list[dict[str, float]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _finished(run: Path) -> bool:
    return any(row["step"] == 1 for row in _metrics(run))


def main(repeats: int = 3) -> None:
    """Measure, print, write."""
    with TemporaryDirectory(prefix="megarl-bench-") as temporary:
        folder = Path(temporary)
        make_tiny_model(folder / "model", hidden_size=64)
        make_arithmetic(folder / "data", num_train=64, num_eval=8, num_sft=64)
        (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
        root = folder / "slurm"
        root.mkdir()
        with slurm_cluster(root, 3) as cluster:
            runs = []
            for index in range(repeats):
                runs.append(measure(cluster, folder, f"run{index}"))
                cluster.wait(lambda: not cluster.run("squeue", "-h").stdout.strip(), JOB_S)
    totals = [sum(run.values()) for run in runs]
    table = Table(
        "part", "seconds, median", "what it is", title=f"megarl submit to first token, three nodes, {repeats} runs"
    )
    for part, meaning in PARTS.items():
        table.add_row(part, f"{statistics.median(run[part] for run in runs):.1f}", meaning)
    table.add_row(
        "all", f"{statistics.median(totals):.1f}", f"from {min(totals):.1f} to {max(totals):.1f}; limit {LIMIT_S:g}"
    )
    Console().print(table)
    write("submit", {"limit_s": LIMIT_S, "totals_s": totals, "runs": runs, "parts": PARTS}, None)
    sys.exit(int(statistics.median(totals) > LIMIT_S))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    main(parser.parse_args().repeats)
