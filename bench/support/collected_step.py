"""A whole step through collectors' processes, from stub servers to blocks in Ray's object store.

Collector and coordinator are the product's. In a run the coordinator is a process of its own; here each collector has one
in its process, and its time counts. Grading takes no time. Blocks are handed over as in a run: an actor's call returns them,
and each is ready once any process can fetch it.

Two steps, one after the other: in the first the object store takes memory that nobody has touched before, which the kernel
has to clear; later ones find it there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench.support.stub_server import PROMPT_TOKENS, VERSION, stub_server
from megarl.cluster.process import ProcessFacts, ProcessSpec, configure_process
from megarl.cluster.runtime import Runtime
from megarl.core.platform import get_platform
from megarl.core.types import Block, Prompt
from megarl.data.prompts import PromptSet
from megarl.recipe.schema import Recipe
from megarl.rewards.combine import Graders, Weighted
from megarl.rewards.grade import Grade
from megarl.rollout.collector import Collector
from megarl.rollout.coordinator import Coordinator
from megarl.rollout.local_advantages import StepPlan
from megarl.serving.client import ServerClient, ServerEndpoint
from tests.models.configs import PLAIN

import ray  # isort: skip  (after megarl.cluster, which decides how Ray authenticates)

STEPS = 2
GROUP = 8
SHARDS = 8
MICRO_BATCH_TOKENS = 32768
LOOK_S = 0.02


@dataclass(frozen=True)
class Size:
    """Of one collector's step. tokens: of each response; in_flight: requests at a time."""

    samples: int
    tokens: int
    in_flight: int


@dataclass(frozen=True)
class Held:
    """One collector's step, when its blocks have been made; `last_s` is on the machine's clock, the rest is bytes and seconds.

    sample_bytes, text_bytes: of what waits for the step. peak_bytes: most memory of its own that the process held so far
    beyond what it had before the first answer. plan_s, blocks_s: from the last answer until the coordinator had made the
    step, and until the collector had made its blocks. cpu_s: of the process so far, from the first answer on.
    """

    num_tokens: int
    sample_bytes: int
    text_bytes: int
    peak_bytes: int
    last_s: float
    plan_s: float
    blocks_s: float
    cpu_s: float


class TimedClient(ServerClient):
    """Knows when the bytes of the last answer were there, before they were read."""

    last_s = 0.0

    async def _send(self, method: str, path: str, body: bytes | None) -> bytes:
        answer = await super()._send(method, path, body)
        self.last_s = time.monotonic()
        return answer


class InTurn:
    """A grader: right and wrong in turn, at once."""

    def __init__(self) -> None:
        self._count = 0

    async def start(self) -> None:
        """Nothing to start."""

    async def grade(self, *_: Any) -> Grade:
        """The next grade."""
        self._count += 1
        return Grade(float(self._count % 2))

    def oldest(self) -> None:
        """No response is long in its hands."""

    async def close(self) -> None:
        """Nothing to end."""


class PeakBytes(threading.Thread):
    """Looks again and again at the memory of this process that is neither shared nor a file's."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.most = own_bytes()

    def run(self) -> None:
        """Look on."""
        while True:
            self.look()
            time.sleep(LOOK_S)

    def look(self) -> None:
        """Look once."""
        self.most = max(self.most, own_bytes())


def own_bytes() -> int:
    """Memory of this process, as far as it is neither shared nor a file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class StepCollector:
    """What runs in a collector's process."""

    def __init__(self, spec: ProcessSpec) -> None:
        self._facts = configure_process(spec)
        self._collector: Any = None
        self._plan: StepPlan | None = None

    async def facts(self) -> ProcessFacts:
        """Where this process runs."""
        return self._facts

    async def open(self, url: str, folder: Path, size: Size) -> None:
        """Get ready."""
        self._client = TimedClient(ServerEndpoint("stub", url, "bench"))
        groups = size.samples // GROUP
        prompts = [Prompt(f"p:{row}", np.arange(PROMPT_TOKENS, dtype=np.int32), "", "") for row in range(groups)]
        recipe = step_recipe(folder, size)
        self._collector = Collector(
            recipe,
            prompts=PromptSet(tuple(prompts), 0),
            eval_prompts=(),
            client=self._client,
            graders=Graders({"in turn": Weighted(InTurn(), 1.0, "in turn", 600.0)}),
            decode=lambda _: "",
        )
        data = await self._collector.start()
        self._coordinator = Coordinator(recipe, [self._collector], data, model=PLAIN, num_shards=SHARDS, beside=False)
        self._peak, self._cpu_s = PeakBytes(), time.process_time()
        self._peak.start()

    async def make(self, step: int) -> None:
        """A step, until it is known what goes where."""
        await self._coordinator.release(VERSION)
        self._plan = await self._coordinator.next(step, VERSION)
        self._plan_s = time.monotonic() - self._client.last_s

    async def part(self) -> tuple[None, *tuple[Block, ...]]:
        """Nothing, then the block of each shard, as a collector gives them."""
        assert self._plan is not None
        blocks = await self._collector.part(self._plan.parts[0])
        self._blocks_s = time.monotonic() - self._client.last_s
        return (None, *blocks)

    async def held(self) -> Held:
        """What it took; to be asked once the blocks are ready."""
        self._peak.look()
        samples = [sample for group in self._collector._groups.values() for sample in group.samples]
        return Held(
            num_tokens=sum(sample.num_tokens for sample in samples),
            sample_bytes=sum(sample.memory.nbytes for sample in samples),
            text_bytes=sum(len(sample.response_text) for sample in samples),
            peak_bytes=self._peak.most - self._peak.first,
            last_s=self._client.last_s,
            plan_s=self._plan_s,
            blocks_s=self._blocks_s,
            cpu_s=time.process_time() - self._cpu_s,
        )


def step_recipe(folder: Path, size: Size) -> Recipe:
    """Of a step of all the samples."""
    return Recipe.model_validate(
        {
            "run": {"dir": folder, "name": f"run-{os.getpid()}"},  # each writes samples of its own
            "model": {"path": folder},
            "data": {"train": folder / "train.jsonl", "shuffle": False},
            "rollout": {
                "prompts_per_step": size.samples // GROUP,
                "samples_per_prompt": GROUP,
                "max_response_tokens": size.tokens,
                "concurrency": size.in_flight,
            },
            "actor": {"micro_batch_tokens": max(MICRO_BATCH_TOKENS, PROMPT_TOKENS + size.tokens)},
            "train": {"steps": STEPS},
        }
    )


def measure_steps(collectors: int, size: Size, sent: Mapping[int, tuple[Any, Any]]) -> list[list[dict[str, float]]]:
    """Steps of this size of each of so many collectors side by side, each with a stub server: [collector][step].

    sent: what the stubs answer, by the first token: ids and log-probs. `ready_s`: from the last answer until all blocks can
    be fetched; `block_bytes`: of these.
    """
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        urls = [stack.enter_context(stub_server(size.tokens)) for _ in range(collectors)]
        runtime = stack.enter_context(Runtime.start(get_platform("cpu"), folder, 1))
        threads = stack.enter_context(ThreadPoolExecutor(collectors))
        specs = [ProcessSpec(f"collector {index}", runtime.logs) for index in range(collectors)]
        actors = [ray.remote(StepCollector).options(num_cpus=0).remote(spec) for spec in specs]
        ray.get([actor.facts.remote() for actor in actors])  # processes take a moment to start

        def one(actor: Any, url: str) -> list[dict[str, float]]:
            ray.get(actor.open.remote(url, folder, size))
            return [made(actor, 1 + index) for index in range(STEPS)]

        def made(actor: Any, step: int) -> dict[str, float]:
            ray.get(actor.make.remote(step))
            [done, *blocks] = actor.part.options(num_returns=1 + SHARDS).remote()
            ray.wait([done, *blocks], num_returns=1 + SHARDS, fetch_local=False)
            ready = time.monotonic()
            held: Held = ray.get(actor.held.remote())
            block_bytes = check(ray.get(blocks), size, sent)
            return asdict(held) | {"ready_s": ready - held.last_s, "block_bytes": block_bytes}

        return list(threads.map(one, actors, urls))


def check(blocks: Sequence[Block], size: Size, sent: Mapping[int, tuple[Any, Any]]) -> int:
    """That blocks hold what the stubs sent, each answer whole; bytes of all."""
    records = [record for block in blocks for record in block.records]
    assert len(records) == size.samples, (len(records), size.samples)
    for record in records:
        ids, logprobs = sent[int(record.tokens[PROMPT_TOKENS])]
        assert np.array_equal(record.tokens[PROMPT_TOKENS:], ids)
        assert np.array_equal(record.rollout_logprobs[PROMPT_TOKENS - 1 : -1], logprobs)
        assert int(record.loss_mask.sum()) == size.tokens
    return sum(memory.nbytes for block in blocks for memory in block.memories)
