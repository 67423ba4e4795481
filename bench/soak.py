"""Whether a long run grows: 1,000 steps with next to no work in each, by the real command line. One command:

    python -m bench.soak [--steps 1000] [--save-every 50]

Responses end by chance, so that hardly two micro-batches are equally long: what libraries keep for each length is seen too.
While the run goes on, /proc is asked of each of its processes: memory of its own, descriptors, threads. So are shared memory and
the run's folder. Shown by kind of process: the median of the first and of the last quarter of the steps, the start left out.
Memory that processes share (the object store, what ranks hand to servers) counts once, as shared memory. A run's folder grows by
design: its lines of metrics, its logs, the samples that it shows, the decisions of its journal; samples in the journal are
removed as checkpoints are committed.
Writes bench/results/soak.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.start import NAMES, name_of
from bench.support.measure import write
from bench.support.peers import Size, make_model
from megarl.core import janitor
from megarl.core.timing import PHASE_FILE, read_phase
from tests.end_to_end.harness import Driver, start
from tools.make_arithmetic import make_arithmetic

LOOK_S = 4.0
LONGEST_S = 4 * 3600.0
SIZE = Size(hidden=64, layers=2, heads=4, kv_heads=2, mean=24, longest=96, prompts=2, samples=2)
SETTING = (
    f"rollout.prompts_per_step={SIZE.prompts}",
    f"rollout.samples_per_prompt={SIZE.samples}",
    f"rollout.max_response_tokens={SIZE.longest}",
    "actor.mini_batch_samples=4",
    "eval.every=50",
    "train.keep_last=1",
)
# By how much the last quarter may be above the first.
MOST_GROWTH, MOST_BYTES, MOST_FILES = 0.03, 8 * 2**20, 2.0
OWN, THREADS, FILES = "own_bytes", "threads", "descriptors"

console = Console(width=120)
Sample = dict[str, Any]


def of_process(pid: int) -> dict[str, float] | None:
    """Memory of its own, threads and descriptors; None where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    if "RssAnon" not in fields:
        return None  # it has ended, and nobody has asked for its code yet
    return {OWN: int(fields["RssAnon"].split()[0]) * 1024, THREADS: int(fields["Threads"]), FILES: files}


def look(driver: Driver) -> Sample | None:
    """All processes of a run by kind, summed up, its shared memory and its folder; None while it is in no step."""
    seen = read_phase(driver.folder / "logs" / PHASE_FILE)
    if seen is None or seen[0] is None:
        return None
    kinds: dict[str, dict[str, float]] = defaultdict(lambda: {"count": 0.0, OWN: 0.0, THREADS: 0.0, FILES: 0.0})
    pids = {driver.process.pid, *janitor.processes_of(driver.run_id())}
    for pid in pids:
        facts, name = of_process(pid), name_of(pid, NAMES)
        if facts is not None and name:
            # Ray's workers say what they do behind the first dot.
            row = kinds["driver" if pid == driver.process.pid else name.partition(".")[0]]
            row["count"] += 1
            for key, value in facts.items():
                row[key] += value
    shared = _bytes(janitor.SHARED_MEMORY / name for name in janitor.segments_of(pids))
    return {"step": seen[0], "kinds": dict(kinds), "shared_bytes": shared, "folder": folder_bytes(driver.folder)}


def _bytes(paths: Iterable[Path]) -> int:
    """Of files, as they take room; what vanishes meanwhile takes none."""
    total = 0
    for path in paths:
        try:
            total += path.lstat().st_blocks * 512 if path.is_file() else 0
        except OSError:
            continue
    return total


def folder_bytes(folder: Path) -> dict[str, int]:
    """What each part of a run's folder takes; of the journal, the decisions apart."""
    sizes = {path.name: _bytes(path.rglob("*") if path.is_dir() else [path]) for path in sorted(folder.iterdir())}
    decisions = folder / "journal" / "decisions.sqlite"
    if decisions.exists():
        sizes["decisions"] = _bytes([decisions])
        sizes["journal"] -= sizes["decisions"]
    return sizes


def quarters(samples: Sequence[Sample], steps: int) -> tuple[list[Sample], list[Sample]]:
    """Those of the first and of the last quarter of the steps; the first tenth is the start's."""
    first = [each for each in samples if steps / 10 < each["step"] <= steps / 10 + steps / 4]
    return first, [each for each in samples if each["step"] > steps * 3 / 4]


def compared(samples: Sequence[Sample], steps: int) -> dict[str, dict[str, list[float]]]:
    """Of each kind of process that there is all the time, each measure in both quarters: median, as [first, last]."""
    both = quarters(samples, steps)
    always = set.intersection(*({*each["kinds"]} for half in both for each in half))
    return {
        kind: {
            key: [statistics.median(each["kinds"][kind][key] for each in half) for half in both]
            for key in ("count", OWN, THREADS, FILES)
        }
        for kind in sorted(always)
    }


def grown(found: dict[str, Any]) -> list[str]:
    """What is larger in the last quarter than in the first, beyond what comes and goes; for people."""
    lines = []
    for kind, row in found["kinds"].items():
        for key, (first, last) in row.items():
            most = max(MOST_BYTES, MOST_GROWTH * first) if key == OWN else MOST_FILES
            if last - first > most:
                lines.append(f"{kind}: {key} from {first:,.0f} to {last:,.0f}")
    first, last = found["shared_bytes"]
    if last - first > max(MOST_BYTES, MOST_GROWTH * first):
        lines.append(f"shared memory from {first:,.0f} to {last:,.0f} bytes")
    return lines


def folder_growth(samples: Sequence[Sample], steps: int) -> dict[str, dict[str, float]]:
    """Of each part of the folder: most bytes in both quarters, and bytes a step between them."""
    first, last = quarters(samples, steps)
    between = statistics.median(each["step"] for each in last) - statistics.median(each["step"] for each in first)
    found = {}
    for name in sorted({name for each in last for name in each["folder"]}):
        sizes = [max(each["folder"].get(name, 0) for each in half) for half in (first, last)]
        found[name] = {"first": sizes[0], "last": sizes[1], "a_step": (sizes[1] - sizes[0]) / between}
    return found


def show(found: dict[str, Any]) -> None:
    """Two tables."""
    table = Table("process", "number", "own MiB", "threads", "descriptors", title="first to last quarter")
    for kind, row in found["kinds"].items():
        cells = [f"{row['count'][0]:.0f}"]
        cells += [f"{first / size:.0f} to {last / size:.0f}" for (first, last), size in _sized(row)]
        table.add_row(kind, *cells)
    console.print(table)
    table = Table("folder", "first, KiB", "last, KiB", "bytes a step")
    for name, each in found["folder"].items():
        table.add_row(name, f"{each['first'] / 1024:.0f}", f"{each['last'] / 1024:.0f}", f"{each['a_step']:.0f}")
    console.print(table)
    console.print(f"shared memory: {' to '.join(f'{each / 2**20:.1f}' for each in found['shared_bytes'])} MiB")
    console.print(f"steps had {found['lengths']} different numbers of tokens")
    console.print(f"the journal took {found['journal_share']:.2%} of the steps' seconds")
    console.print("grown: " + ("; ".join(found["grown"]) or "nothing"))


def _sized(row: dict[str, list[float]]) -> list[tuple[list[float], float]]:
    return [(row[OWN], 2**20), (row[THREADS], 1), (row[FILES], 1)]


def watched(folder: Path, settings: Sequence[str]) -> tuple[list[Sample], Driver]:
    """A run, looked at until it ends. Raises RuntimeError where it fails."""
    driver, samples = start(folder, "run.name=soak", *settings), []
    try:
        with ThreadPoolExecutor(1) as reader:
            ended = reader.submit(driver.finish, LONGEST_S)  # its console is read: a pipe that is full would stop it
            while not ended.done():
                time.sleep(LOOK_S)
                if (driver.folder / "metrics.jsonl").exists() and (sample := look(driver)) is not None:
                    samples.append(sample)
            code, _, error = ended.result()
    finally:
        driver.process.kill()
    if code:
        raise RuntimeError(f"The run ended with code {code}:\n{error}")
    driver.assert_nothing_left(within_s=60)
    return samples, driver


def main(steps: int, save_every: int, out: Path | None = None) -> None:
    """Run, compare and write."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", SIZE)
        make_arithmetic(folder / "data", num_train=64, num_eval=8, num_sft=64)
        began = time.monotonic()
        samples, driver = watched(folder, [*SETTING, f"train.steps={steps}", f"train.save_every={save_every}"])
        seconds, rows = time.monotonic() - began, [row for row in driver.metrics() if row["step"]]
    first, last = quarters(samples, steps)
    found: dict[str, Any] = {
        "steps": steps,
        "seconds": seconds,
        "looks": len(samples),
        "step_s": [
            statistics.median(row["perf/step_s"] for row in part)
            for part in (rows[steps // 10 : steps // 10 + steps // 4], rows[-steps // 4 :])
        ],
        "lengths": len({round(row["perf/tokens_per_s"] * row["perf/step_s"]) for row in rows}),
        "tokens_a_step": statistics.mean(row["perf/tokens_per_s"] * row["perf/step_s"] for row in rows),
        "journal_share": sum(row["perf/journal_s"] for row in rows) / sum(row["perf/step_s"] for row in rows),
        "kinds": compared(samples, steps),
        "shared_bytes": [statistics.median(each["shared_bytes"] for each in half) for half in (first, last)],
        "folder": folder_growth(samples, steps),
    }
    found["grown"] = grown(found)
    show(found)
    write("soak", found, out)
    if found["grown"]:
        sys.exit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=50)
    args = parser.parse_args()
    main(args.steps, args.save_every)
