"""Where the start of a run goes: seconds, and CPU seconds of every process, from the command to the first request for a sample.

    python -m bench.start                # --turns N; the quickstart's recipe on its untrained model

A run of one step is watched from outside, by /proc. It is ready when its first line of metrics is there: servers and ranks are
up, the servers have the trainer's weights, and both were found to say the same. CPU seconds, unlike seconds, are the same on a
machine that others use as well. Processes are named as they name themselves; what Ray starts in reserve is `ray::IDLE`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.support.measure import write
from bench.support.quickstart import ROOT, call

LOOK_S = 0.02
TICKS = os.sysconf("SC_CLK_TCK")
# What is in a command line, and how the process is called here; the first that fits.
NAMES = {
    "ray::": "",
    "sglang::": "",
    "gcs_server": "ray: gcs",
    "raylet": "ray: raylet",
    "ray_process": "ray: worker, unnamed",
    "ray/": "ray: agents and monitors",
    "sglang_cpu": "sglang server",
    "sglang_router": "router",
    "guarded.py": "router or server, before its exec",
    "megarl.core.janitor": "janitor",
    "megarl.rewards": "grader",
    "megarl train": "driver",
}


@dataclass
class Seen:
    """One process. first_s: when it was there first, from the command. cpu_s: its own, without its children's."""

    name: str
    first_s: float
    cpu_s: float


class Watch:
    """A command's process and its descendants, as /proc shows them. names: as NAMES."""

    def __init__(self, pid: int, names: Mapping[str, str]) -> None:
        self.began = time.monotonic()
        self.seen: dict[int, Seen] = {pid: Seen("driver", 0.0, 0.0)}
        self._names = names

    def look(self) -> None:
        """Count what there is now."""
        now = time.monotonic() - self.began
        parents: dict[int, int] = {}
        stats: dict[int, list[str]] = {}
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                try:
                    fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue  # it ended meanwhile
                parents[int(entry.name)], stats[int(entry.name)] = int(fields[1]), fields
        for pid in sorted(parents):
            if pid not in self.seen and parents[pid] in self.seen:
                self.seen[pid] = Seen("not named in time", now, 0.0)
            if pid in self.seen:
                one, fields = self.seen[pid], stats[pid]
                one.cpu_s = sum(map(int, fields[11:13])) / TICKS
                one.name = name_of(pid, self._names) or one.name

    def by_name(self) -> dict[str, dict[str, float]]:
        """Number, first second and CPU seconds of the processes of each name."""
        found: dict[str, dict[str, float]] = {}
        for one in self.seen.values():
            row = found.setdefault(one.name, {"count": 0, "first_s": one.first_s, "cpu_s": 0.0})
            row["count"] += 1
            row["first_s"] = min(row["first_s"], one.first_s)
            row["cpu_s"] += one.cpu_s
        return found


def name_of(pid: int, names: Mapping[str, str]) -> str:
    """For people; nothing where the process has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    for mark, name in names.items():
        if mark in words:
            return name or words.split(" ")[0]
    return " ".join(words.split(" ")[:3])[:60]


def start(folder: Path, settings: list[str]) -> dict[str, Any]:
    """One run, watched until it is ready."""
    file = folder / "runs" / "start" / "metrics.jsonl"
    command = [sys.executable, "-m", "megarl", "train", "recipes/quickstart.yaml", *settings]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        watch = Watch(process.pid, NAMES)
        while process.poll() is None and not (file.exists() and file.stat().st_size):
            watch.look()
            time.sleep(LOOK_S)
        watch.look()
        seconds, found = time.monotonic() - watch.began, watch.by_name()
        if process.wait():
            sys.exit(f"The run exited with {process.returncode}:\n{(folder / 'log').read_text()[-4000:]}")
        whole_s = time.monotonic() - watch.began
    return {
        "ready_s": seconds,
        "whole_s": whole_s,
        "cpu_s": sum(row["cpu_s"] for row in found.values()),
        "processes": found,
        "load": os.getloadavg()[0],
    }


def show(runs: list[dict[str, Any]]) -> None:
    """The table of the run that took the fewest CPU seconds."""
    best = min(runs, key=lambda run: run["cpu_s"])
    table = Table(title=f"ready after {best['ready_s']:.1f} s, {best['cpu_s']:.1f} CPU seconds")
    for column in ("process", "number", "begins at s", "CPU s"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for name, row in sorted(best["processes"].items(), key=lambda item: -item[1]["cpu_s"]):
        table.add_row(name, f"{row['count']:.0f}", f"{row['first_s']:.1f}", f"{row['cpu_s']:.2f}")
    Console(width=100).print(table)


def main(turns: int, out: Path | None = None) -> None:
    """Measure and show; writes start.json."""
    with tempfile.TemporaryDirectory(prefix="bs-", dir="/tmp") as name:  # Ray's sockets have long names
        folder = Path(name)
        call("tools/make_tiny_model.py", "--out", str(folder / "model"))
        call("tools/make_arithmetic.py", "--out", str(folder / "data"))
        settings = [
            *(f"run.dir={folder}/runs", "run.name=start", f"model.path={folder}/model", "train.steps=1"),
            *(f"data.train={folder}/data/train.jsonl", "data.eval=null", "eval.every=null"),
        ]
        runs = []
        for turn in range(turns):
            shutil.rmtree(folder / "runs", ignore_errors=True)
            runs.append(start(folder, settings))
            print(
                f"turn {turn + 1}: ready after {runs[-1]['ready_s']:.1f} s, {runs[-1]['cpu_s']:.1f} CPU seconds",
                flush=True,
            )
    show(runs)
    middle = {name: statistics.median(run[name] for run in runs) for name in ("ready_s", "cpu_s", "whole_s")}
    write("start", {"median": middle, "runs": runs}, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    main(parser.parse_args().turns)
