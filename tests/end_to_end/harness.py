"""Runs of the real command line, with small inputs, and a look at what they leave behind."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megarl.cluster.stacks import foreign_stack
from megarl.core import janitor
from tests.support.processes import heed_interrupts

START_S = 300.0  # beyond the run's own deadline for a start, whose error says more
POLL_S = 0.1
LOG_LINES = 40

SLOWLY = "reward.fn=tests.end_to_end.rewards:share_of_digits_slowly"
RECIPE = """
run: {{name: run, dir: {folder}/runs}}
cluster: {{platform: cpu}}
model: {{path: {folder}/model, dtype: float32}}
data: {{train: {folder}/data/train.jsonl, eval: {folder}/data/eval.jsonl, max_prompt_tokens: 32}}
rollout: {{prompts_per_step: 4, samples_per_prompt: 4, max_response_tokens: 16}}
reward: {{fn: "tests.end_to_end.rewards:share_of_digits"}}
algorithm: {{kl_coef: 0.01}}
actor: {{mini_batch_samples: 8, micro_batch_tokens: 256, optimizer: {{lr: 1.0e-3}}}}
train: {{steps: 3, save_every: 2}}
deadlines: {{start_s: 240, rollout_s: 240, train_s: 240, sync_s: 240}}
"""


@dataclass
class Driver:
    """A running `megarl train`."""

    process: subprocess.Popen[str]
    folder: Path  # the run's
    shared_memory_before: set[str]
    temp: Path  # its TMPDIR

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def run_id(self) -> str:
        """Of the last life: a run that goes on appends to its log."""
        return str(re.findall(r"run id ([0-9a-f]{16})", (self.folder / "logs" / "driver.log").read_text())[-1])

    def pids(self, wanted: Callable[[str], bool]) -> list[int]:
        """Processes of the run by their command line."""
        found = []
        for pid in janitor.processes_of(self.run_id()):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if wanted(command):
                found.append(pid)
        return found

    def wait_for_step(self, step: int) -> None:
        """Until the step is in metrics.jsonl."""
        self.wait_for(lambda row: row["step"] >= step)

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Until a row of metrics.jsonl is as wanted."""
        end = time.monotonic() + START_S
        while not any(wanted(row) for row in self.metrics()):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, f"no such row came within {START_S} s: {self.metrics()}\n{self.where()}"
            select.select([], [], [], POLL_S)

    def where(self) -> str:
        """What the run's processes are doing: the end of the driver's log, and all stacks."""
        log = self.folder / "logs" / "driver.log"
        if not log.exists():
            return f"no {log} yet\n{foreign_stack(self.process.pid)}"
        tail = log.read_text().splitlines()[-LOG_LINES:]
        pids = sorted({self.process.pid, *janitor.processes_of(self.run_id())})
        stacks = (f"== {pid} {' '.join(psutil.Process(pid).cmdline())[:200]}\n{foreign_stack(pid)}" for pid in pids)
        return "\n".join([*tail, *stacks])

    def finish(self, timeout_s: float = START_S) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def end(self) -> None:
        """Whatever happened in the test: the driver does not outlive it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def assert_nothing_left(self, *folders: Path, within_s: float = 10.0) -> None:
        """No process, no shared memory, no temporary file and none of these folders, at the latest so many seconds from now."""
        end = time.monotonic() + within_s
        run_id = self.run_id()
        while True:
            processes = janitor.processes_of(run_id)
            segments = {path.name for path in janitor.SHARED_MEMORY.iterdir()} - self.shared_memory_before
            # What somebody else's living process holds is not this run's.
            segments -= janitor.segments_of(psutil.pids()) if segments and not processes else set()
            files = [*self.temp.iterdir(), *(each for each in folders if each.exists())]
            if not processes and not segments and not files:
                return
            assert time.monotonic() < end, (processes, segments, files)
            select.select([], [], [], POLL_S)


def start(folder: Path, *overrides: str, command: str = "train", run: Path | None = None) -> Driver:
    """Start `megarl train` on the inputs in `folder`. run: what another command takes in the place of the recipe."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder))
    name = next((each.split("=")[1] for each in overrides if each.startswith("run.name=")), "run")
    # The paths of Ray's sockets have to stay short.
    temp = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    process = subprocess.Popen(
        [sys.executable, "-m", "megarl", command, str(run or recipe), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temp)},
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    segments = {path.name for path in janitor.SHARED_MEMORY.iterdir()}
    driver = Driver(process, folder / "runs" / name, segments, temp)
    weakref.finalize(driver, shutil.rmtree, temp, ignore_errors=True)
    return driver


def is_rank(command: str) -> bool:
    return command.startswith("ray::RankActor")


def is_coordinator(command: str) -> bool:
    return command.startswith("ray::CoordinatorActor")


def is_raylet(command: str) -> bool:
    return "raylet/raylet" in command.split(" ", maxsplit=1)[0]


def is_server(command: str) -> bool:
    return "megarl.serving.sglang_cpu" in command


def own_words(error: str) -> str:
    """What megarl says itself: without the logs that it shows."""
    return error.partition("--- end of")[0]


def pasted(error: str) -> list[str]:
    """The command that the last line tells to paste."""
    return shlex.split(error.rstrip().splitlines()[-1])


def assert_says_how_to_go_on(driver: Driver, number: signal.Signals, error: str, overrides: Sequence[str]) -> Path:
    """That a driver which was told to end by a signal said so, and how to go on; the last checkpoint, which it names."""
    last = max((driver.folder / "checkpoints").glob("step_*"))
    assert f"megarl: {number.name}: ending" in error and "interrupted by" in error and "Traceback" not in error
    assert re.search(r"The run was in step \d+ of 1000 \(\w+\)", error)
    assert f"The last good checkpoint is {last}, of step {int(last.name[5:])}." in error
    words = [sys.executable, "-m", "megarl", "train", str(driver.folder.parents[1] / "recipe.yaml")]
    assert pasted(error) == [*words, *overrides, "--resume"]
    return last


def kill(pids: list[int]) -> None:
    assert pids, "nothing to kill"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
