"""The process that hands out packed rows of supervised runs, so that the driver never holds tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from megarl.cluster.process import ProcessFacts, ProcessSpec, configure_process
from megarl.cluster.roles import Batch
from megarl.cluster.runtime import Runtime
from megarl.cluster.slots import slot_on
from megarl.cluster.waits import Call, Waiter, Worker
from megarl.core.types import BatchInfo, Block, ShardPlan
from megarl.data.pack import Packed
from megarl.data.pack_rows import pack_pairs, pack_sft, pack_unpaired
from megarl.data.row_set import RowSource
from megarl.data.supervised import Rows, demonstrations_of, load_supervised, rows_by_set
from megarl.data.unpaired import mismatched
from megarl.models.flops import train_flops
from megarl.models.hf_config import load_model_config
from megarl.models.recipe_vision import sight_of
from megarl.recipe.supervised import PairData, RmRecipe, SupervisedRecipe, UnpairedData, estimates_kl


class FeederActor:
    """What runs in the feeder's process."""

    def __init__(self, spec: ProcessSpec, recipe: SupervisedRecipe, num_shards: int) -> None:
        self._facts = configure_process(spec)
        self._recipe = recipe
        self._model = load_model_config(recipe.model.path)
        self._num_shards = num_shards
        rows: Any = self._load(recipe.data.train)
        sets, data = rows_by_set(rows, recipe.data), recipe.data
        self._source: RowSource[Any] = RowSource(rows, recipe.run.seed, shuffle=data.shuffle, sets=sets, mix=data.mix)

    def facts(self) -> ProcessFacts:
        """Where this process runs."""
        return self._facts

    def take(self, step: int) -> tuple[BatchInfo | ShardPlan | Block, ...]:
        """The step's rows: counts, then the plan of each shard, then its block; those of mismatched rows behind them."""
        train = self._recipe.train
        rows = self._source.take(train.batch_samples)
        lengths = [len(each.token_ids) for row in rows for each in demonstrations_of(row)]
        scores, frozen = isinstance(self._recipe, RmRecipe), self._recipe.actor.lora is not None
        flops = train_flops(self._model, lengths, weight_gradients=not frozen, scores=scores)
        return self._packed(rows, step, {"data/epoch": self._source.epoch, "perf/train_flops": flops})

    def held_out(self) -> tuple[BatchInfo | ShardPlan | Block, ...]:
        """All held-out rows, as `take` gives those of a step."""
        data = self._recipe.data
        assert data.eval is not None, "the recipe has no held-out rows"
        return self._packed(self._load(data.eval).rows, 0, {})

    def _load(self, path: Path) -> Rows:
        data = self._recipe.data
        return load_supervised(path, self._recipe.model.path, data, sight_of(self._model, data))

    def _packed(
        self, rows: Sequence[Any], step: int, metrics: dict[str, float]
    ) -> tuple[BatchInfo | ShardPlan | Block, ...]:
        sizes = {"num_shards": self._num_shards, "micro_batch_tokens": self._recipe.actor.micro_batch_tokens}
        data, others = self._recipe.data, list[Packed]()
        if isinstance(data, PairData):
            packed = pack_pairs(rows, scored=isinstance(self._recipe, RmRecipe), **sizes)
        elif isinstance(data, UnpairedData):
            packed = pack_unpaired(rows, **sizes)
            if estimates_kl(self._recipe):
                others = pack_unpaired(mismatched(rows, data.max_tokens), **sizes)
        else:
            packed = pack_sft(rows, **sizes)
        texts = [each for row in rows for each in demonstrations_of(row)]
        tokens, trained = sum(len(each.token_ids) for each in texts), sum(int(each.loss_mask.sum()) for each in texts)
        info = BatchInfo(
            step=step,
            weight_version=0,
            num_samples=len(texts),
            num_groups=len(rows),
            prompt_tokens=tokens - trained,
            response_tokens=trained,
            metrics=metrics,
        )
        return (info, *_parts(packed), *_parts(others))

    def state(self) -> dict[str, Any]:
        """The cursor."""
        return self._source.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved cursor."""
        self._source.load_state(state)


def _parts(packed: Sequence[Packed]) -> tuple[ShardPlan | Block, ...]:
    return (*(plan for plan, _ in packed), *(block for _, block in packed))


@dataclass(frozen=True)
class Feeder:
    """The driver's handle of the feeder. mismatches: whether it gives mismatched rows beside those of a step."""

    worker: Worker
    waiter: Waiter
    num_shards: int
    deadline_s: float
    mismatches: bool = False

    @classmethod
    def start(cls, runtime: Runtime, recipe: SupervisedRecipe, num_shards: int, waiter: Waiter) -> Feeder:
        """Start the process and read all rows."""
        spec = runtime.process("feeder")
        handle = ray.remote(FeederActor).options(**slot_on(runtime.here).options).remote(spec, recipe, num_shards)
        worker = Worker(handle, spec)
        facts = waiter.wait(
            [Call(worker, handle.facts.remote())], phase="start", role="feeder", deadline_s=recipe.deadlines.start_s
        )[0]
        return cls(Worker(handle, spec, facts), waiter, num_shards, recipe.deadlines.train_s, estimates_kl(recipe))

    def take(self, step: int) -> Batch:
        """The step's rows, packed, as references."""
        return self._batch(self.worker.handle.take.options(num_returns=self._num_returns).remote(step))

    def held_out(self) -> Batch:
        """The held-out rows, packed, as references."""
        return self._batch(self.worker.handle.held_out.options(num_returns=self._num_returns).remote())

    @property
    def _num_returns(self) -> int:
        return 1 + 2 * self.num_shards * (2 if self.mismatches else 1)

    def state(self) -> dict[str, Any]:
        """The data cursor, for a checkpoint."""
        state: dict[str, Any] = self._call(self.worker.handle.state.remote())
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved cursor."""
        self._call(self.worker.handle.load_state.remote(state))

    def _batch(self, references: Sequence[Any]) -> Batch:
        found, each = self._call(references[0]), 2 * self.num_shards
        rows, *others = [
            self._rows(references[first : first + each], found) for first in range(1, len(references), each)
        ]
        return replace(rows, mismatched=others[0]) if others else rows

    def _rows(self, parts: Sequence[Any], info: BatchInfo) -> Batch:
        plans, blocks = parts[: self.num_shards], parts[self.num_shards :]
        return Batch(tuple(plans), tuple((block,) for block in blocks), info)

    def _call(self, ref: Any) -> Any:
        calls = [Call(self.worker, ref)]
        return self.waiter.wait(calls, phase="data", role="feeder", deadline_s=self.deadline_s)[0]
