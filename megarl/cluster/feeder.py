"""The process that deals out packed demonstrations, so that the driver never holds tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray

from megarl.cluster.process import ProcessFacts, ProcessSpec, configure_process
from megarl.cluster.roles import Batch
from megarl.cluster.runtime import Runtime
from megarl.cluster.seats import seat_on
from megarl.cluster.waits import Call, Waiter, Worker
from megarl.core.types import BatchInfo, Shard
from megarl.data.pack import pack_sft
from megarl.data.sft import SftSource, load_demonstrations
from megarl.models.flops import train_flops
from megarl.models.hf_config import load_model_config
from megarl.recipe.supervised import SftRecipe


class FeederActor:
    """What runs in the feeder's process."""

    def __init__(self, spec: ProcessSpec, recipe: SftRecipe, num_shards: int) -> None:
        self._facts = configure_process(spec)
        self._recipe = recipe
        self._model = load_model_config(recipe.model.path)
        self._num_shards = num_shards
        self._source = SftSource(
            load_demonstrations(recipe.model.path, recipe.data), recipe.run.seed, shuffle=recipe.data.shuffle
        )

    def facts(self) -> ProcessFacts:
        """Where this process runs."""
        return self._facts

    def take(self, step: int) -> tuple[BatchInfo | Shard, ...]:
        """Counts, then one shard a data-parallel rank."""
        demonstrations = self._source.take(self._recipe.train.batch_samples)
        shards = pack_sft(
            demonstrations, num_shards=self._num_shards, micro_batch_tokens=self._recipe.actor.micro_batch_tokens
        )
        tokens = sum(len(item.token_ids) for item in demonstrations)
        trained = sum(int(item.loss_mask.sum()) for item in demonstrations)
        info = BatchInfo(
            step=step,
            weight_version=0,
            num_samples=len(demonstrations),
            num_groups=len(demonstrations),
            num_mini_batches=1,
            prompt_tokens=tokens - trained,
            response_tokens=trained,
            metrics={
                "data/epoch": float(self._source.epoch),
                "perf/train_flops": train_flops(
                    self._model,
                    [len(item.token_ids) for item in demonstrations],
                    weight_gradients=self._recipe.actor.lora is None,
                ),
            },
        )
        return (info, *shards)

    def state(self) -> dict[str, Any]:
        """The cursor."""
        return self._source.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved cursor."""
        self._source.load_state(state)


@dataclass(frozen=True)
class SftFeeder:
    """The driver's handle of the feeder."""

    worker: Worker
    waiter: Waiter
    num_shards: int
    deadline_s: float

    @classmethod
    def start(cls, runtime: Runtime, recipe: SftRecipe, num_shards: int, waiter: Waiter) -> SftFeeder:
        """Start the process and read all demonstrations."""
        spec = runtime.process("feeder")
        handle = ray.remote(FeederActor).options(**seat_on(runtime.here).options).remote(spec, recipe, num_shards)
        worker = Worker(handle, spec, ProcessFacts(0, "?"))
        facts = waiter.wait(
            [Call(worker, handle.facts.remote())], phase="start", role="feeder", deadline_s=recipe.deadlines.start_s
        )[0]
        return cls(Worker(handle, spec, facts), waiter, num_shards, recipe.deadlines.train_s)

    def take(self, step: int) -> Batch:
        """The next batch of demonstrations, packed, as references."""
        info, *shards = self.worker.handle.take.options(num_returns=1 + self.num_shards).remote(step)
        counts = self.waiter.wait([Call(self.worker, info)], phase="data", role="feeder", deadline_s=self.deadline_s)[0]
        return Batch(tuple(shards), counts)

    def state(self) -> dict[str, Any]:
        """The data cursor, for a checkpoint."""
        state: dict[str, Any] = self._call(self.worker.handle.state.remote())
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved cursor."""
        self._call(self.worker.handle.load_state.remote(state))

    def _call(self, ref: Any) -> Any:
        calls = [Call(self.worker, ref)]
        return self.waiter.wait(calls, phase="data", role="feeder", deadline_s=self.deadline_s)[0]
