"""What the driver itself costs a step, and that it does not grow with the samples: the real loop over stub roles.

The stubs are real Ray actors that receive and return shards and columns of the real size through the object store, and
compute nothing. Everything else is the run's own: loop, handles, waits. One command:

    python -m bench.driver_overhead

Driver seconds are the step's wall time outside of waits for others, and the driver process's CPU time, waits included:
the stricter of the two is held against the seconds of a step. A control tells growth with the samples from what merely a
longer step costs (a driver that slept longer wakes up to colder caches): few samples, with stubs that take as long as those
of the most samples did.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.support.measure import write
from megarl.cluster.process import ProcessFacts, ProcessSpec, configure_process
from megarl.cluster.ranks import RankGroup
from megarl.cluster.roles import Batch, ColumnRefs, Role
from megarl.cluster.runtime import Runtime
from megarl.cluster.samples import Learnable
from megarl.cluster.waits import Call, Waiter, Worker
from megarl.core.layout import Layout
from megarl.core.pending import Finished
from megarl.core.platform import get_platform
from megarl.core.protocols import Coming, Handles, State
from megarl.core.timing import PhaseTimer
from megarl.core.types import BatchInfo, Block, EvalResult, FloatArray, MiniBatches, ShardPlan
from megarl.data.blocks import memory_of
from megarl.recipe.run import Deadlines, Model
from megarl.recipe.schema import Data, Recipe, Rollout, Train
from megarl.train import train

import ray  # isort: skip  (after megarl.cluster, which decides how Ray authenticates)

# Realistic, and enough for every column to travel through the object store: Ray sends smaller ones inside of its messages.
TOKENS_PER_SAMPLE = 512
MICRO_BATCH_TOKENS = 16384
STEPS = 40
WARM_UP = 10
CALLS = 5  # remote calls of a step: generate, log-probs twice, advantages, update


def make_shard(samples: int) -> tuple[ShardPlan, Block]:
    """One mini-batch of so many samples, in micro-batches of MICRO_BATCH_TOKENS."""
    per_micro = MICRO_BATCH_TOKENS // TOKENS_PER_SAMPLE
    counts = tuple(min(per_micro, samples - first) for first in range(0, samples, per_micro))
    each = np.arange(samples, dtype=np.int64)
    tokens, mask = np.zeros(TOKENS_PER_SAMPLE, np.int32), np.ones(TOKENS_PER_SAMPLE, np.uint8)
    memories = tuple(memory_of((tokens,), 0, mask, -mask.astype(np.float32)) for _ in range(samples))
    block = Block(memories, np.full(samples, 1 / (samples * TOKENS_PER_SAMPLE), np.float32), each)
    return ShardPlan((counts,), np.zeros(samples, np.int64), each), block


def column_of(block: Block) -> FloatArray:
    return np.zeros(block.num_tokens, np.float32)


class StubRank:
    """A rank that returns columns of the right size and computes nothing."""

    def __init__(self, spec: ProcessSpec, delay_s: float) -> None:
        self._facts = configure_process(spec)
        self._delay_s = delay_s

    def facts(self) -> ProcessFacts:
        return self._facts

    def logprobs(
        self, role: str, temperature: float | None, of: MiniBatches, num_owners: int, plan: ShardPlan, block: Block
    ) -> tuple[None, FloatArray]:
        time.sleep(self._delay_s)
        return None, column_of(block)

    def update(
        self,
        role: str,
        names: tuple[str, ...],
        kl: float,
        num_shards: int,
        num_owners: int,
        plan: ShardPlan,
        block: Block,
        *columns: FloatArray,
    ) -> dict[str, float]:
        time.sleep(self._delay_s)
        return {"actor/loss": float(block.num_tokens)}


class StubCollector:
    """A collector that has its samples already."""

    def __init__(self, spec: ProcessSpec, samples: int, delay_s: float) -> None:
        self._facts = configure_process(spec)
        self._delay_s = delay_s
        self._samples = samples
        self._plan, self._block = make_shard(samples)

    def facts(self) -> ProcessFacts:
        return self._facts

    def generate(self, step: int, version: int) -> tuple[BatchInfo, ShardPlan, Block]:
        time.sleep(self._delay_s)
        tokens = self._samples * TOKENS_PER_SAMPLE
        return BatchInfo(step, version, self._samples, self._samples, 0, tokens, {}), self._plan, self._block

    def advantages(self, step: int, *columns: FloatArray) -> tuple[None, FloatArray]:
        time.sleep(self._delay_s)
        return None, column_of(self._block)


@dataclass(frozen=True)
class StubRollout:
    worker: Worker
    waiter: Waiter

    def next(self, step: int, weight_version: int) -> Batch:
        info, plan, block = self.worker.handle.generate.options(num_returns=3).remote(step, weight_version)
        found: BatchInfo = self._wait(info)
        return Batch((plan,), ((block,),), found)

    def advantages(self, batch: Batch, columns: dict[str, ColumnRefs]) -> Learnable:
        parts = [part for column in columns.values() for shard in column for part in shard]
        done, column = self.worker.handle.advantages.options(num_returns=2).remote(batch.info.step, *parts)
        self._wait(done)
        return Learnable({"advantages": ((column,),)}, {})

    def evaluate(self, step: int, weight_version: int) -> Finished[EvalResult]:
        raise AssertionError("this recipe has no held-out rows")

    def _wait(self, ref: Any) -> Any:
        return self.waiter.wait([Call(self.worker, ref)], phase="stub", role="rollout", deadline_s=60)[0]


class StubSync:
    def push(self, weight_version: int) -> dict[str, float]:
        return {}


@dataclass
class StubRecorder:
    """Records the driver's seconds: outside of waits, and of CPU."""

    outside_waits: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    last_cpu: float = field(default_factory=time.process_time)

    def expect(self, step: int, coming: Coming) -> None:
        raise AssertionError("this recipe has neither a critic nor held-out rows")

    def end_of(self, step: int, metrics: dict[str, float], failure: str = "") -> None:
        now = time.process_time()
        self.outside_waits.append(metrics["perf/driver_s"])
        self.wall.append(metrics["perf/step_s"])
        self.cpu.append(now - self.last_cpu)
        self.last_cpu = now

    def stopping(self) -> bool:
        return False

    def save(self, state: State) -> None:
        """Nothing to save."""


def start(actor: type, spec: ProcessSpec, *values: object) -> Worker:
    handle = ray.remote(actor).options(num_cpus=0).remote(spec, *values)
    return Worker(handle, spec, ray.get(handle.facts.remote()))


def measure(runtime: Runtime, samples: int, delay_s: float = 0.0) -> dict[str, float]:
    """Medians over the steps after the warm-up. delay_s: how long each of the step's five remote calls sleeps."""
    timer = PhaseTimer()
    waiter = Waiter(timer)
    rank = start(StubRank, ProcessSpec(f"rank of {samples}", runtime.logs), delay_s)
    collector = start(StubCollector, ProcessSpec(f"collector of {samples}", runtime.logs), samples, delay_s)
    ranks, layout = RankGroup((rank,), waiter), Layout()
    recorder = StubRecorder()
    recipe = Recipe(
        model=Model(path=Path("none")),
        data=Data(train=Path("none")),
        rollout=Rollout(prompts_per_step=samples, samples_per_prompt=1, max_response_tokens=TOKENS_PER_SAMPLE),
        train=Train(steps=STEPS),
    )
    reads = frozenset({"old_logprobs", "ref_logprobs", "advantages"})
    actor, reference = (Role(name, ranks, layout, Deadlines(), reads) for name in ("actor", "reference"))
    handles = Handles(
        StubRollout(collector, waiter),
        actor,
        reference=reference,
        critic=None,
        reward_model=None,
        teacher=None,
        sync=StubSync(),
        recorder=recorder,
        timer=timer,
    )
    train(handles, recipe, State())
    for worker in (rank, collector):
        ray.kill(worker.handle)
    figures = {"outside_waits_s": recorder.outside_waits, "cpu_s": recorder.cpu, "stub_step_s": recorder.wall}
    return {name: statistics.median(values[WARM_UP:]) for name, values in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument(
        "--metrics", type=Path, default=Path("runs/quickstart/metrics.jsonl"), help="a real run's, for the share"
    )
    options = parser.parse_args()
    with TemporaryDirectory() as folder, Runtime.start(get_platform("cpu"), Path(folder), 1) as runtime:
        results = {f"{samples:,}": measure(runtime, samples) for samples in options.samples}
        first, last = (results[f"{options.samples[end]:,}"] for end in (0, -1))
        delay_s = (last["stub_step_s"] - first["stub_step_s"]) / CALLS
        control = measure(runtime, options.samples[0], delay_s)
    results[f"{options.samples[0]:,}, as slow as {options.samples[-1]:,}"] = control
    real = [json.loads(line) for line in options.metrics.read_text().splitlines()] if options.metrics.exists() else []
    steps = [row["perf/step_s"] for row in real if "perf/step_s" in row and "perf/eval_s" not in row]
    step_s = statistics.median(steps) if steps else float("nan")
    table = Table(title="the driver's own time in one step (medians)")
    for column in ("samples", "outside waits", "CPU", f"CPU / a real step of {step_s:.2f} s"):
        table.add_column(column, justify="right")
    for samples, row in results.items():
        cells = (
            f"{row['outside_waits_s'] * 1e3:.2f} ms",
            f"{row['cpu_s'] * 1e3:.2f} ms",
            f"{row['cpu_s'] / step_s:.2%}",
        )
        table.add_row(samples, *cells)
    Console().print(table)
    growth = {name: last[name] / control[name] for name in ("outside_waits_s", "cpu_s")}
    Console().print(
        f"{options.samples[-1]:,} samples against {options.samples[0]:,} in steps of the same length: "
        f"x{growth['outside_waits_s']:.2f} outside waits, x{growth['cpu_s']:.2f} CPU",
        highlight=False,
    )
    write("driver_overhead", {"results": results, "growth": growth, "real_step_s": step_s}, None)


if __name__ == "__main__":
    main()
