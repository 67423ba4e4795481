"""One model on one rank: log-probs, updates, weights out, state in and out. Megatron does the work.

It knows no Ray, no rollouts and no algorithms: it is given micro-batches, columns and a loss.
Import only after `models.bootstrap.prepare_megatron`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor

from megarl.core.errors import MegarlError
from megarl.core.platform import Platform
from megarl.core.progress import Progress
from megarl.core.types import Column, FloatArray, MiniBatch, Shard
from megarl.models.carried import carried
from megarl.models.config import ModelConfig
from megarl.models.hf_gather import Gatherer, export_buckets
from megarl.models.hf_pieces import Pieces
from megarl.models.hf_weights import Bucket, Value
from megarl.models.lora import adapters_off
from megarl.models.lora_settings import LoraSettings
from megarl.models.peft import save_peft
from megarl.models.seen import Seen
from megarl.training.batch import Bounds, DeviceBatch, cut_sequences, joined_top, to_device
from megarl.training.build import build_role
from megarl.training.checkpoint import PendingSave, load_checkpoint, save_checkpoint, saved_by
from megarl.training.exports import exported, main_grad
from megarl.training.logprob import TokenScores, vocab_parallel_logprobs, vocab_parallel_top
from megarl.training.losses import Loss
from megarl.training.metrics import LossOutput, MetricSums
from megarl.training.offload import PARTS, Offload, Part
from megarl.training.optimizer import Stepper
from megarl.training.parallel import Groups
from megarl.training.schedule import Evaluate, num_fillers, run_schedule
from megarl.training.spec import RoleSpec


@dataclass(frozen=True)
class ShardScores:
    """Label-aligned columns of one shard."""

    logprobs: Column
    entropy: Column | None


class Engine:
    """A GPTModel sharded over the ranks of `groups`; trainable where an optimizer is given, frozen otherwise.

    Every rank of the pool builds the same engines in the same order and makes the same calls.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: RoleSpec,
        groups: Groups,
        platform: Platform,
        seed: int,
        progress: Progress | None = None,
    ) -> None:
        """Build this rank's part of the model and load its weights from the HF folder. seed: of new weights (LoRA)."""
        self._config, self._spec, self._groups, self._device = config, spec, groups, platform.device
        self._chunk_elements, self._progress = platform.chunk_elements, progress or Progress(None)
        with groups.active():
            built = build_role(config, spec, groups, platform, seed)
        self._chunks, self._wrapped, self._stepper = built.chunks, built.wrapped, built.stepper
        self._auxiliary, self._replays, self._shares = built.auxiliary, built.replays, built.shares
        self._images = built.images
        self.along = carried(spec.folder, config) if groups.rank == 0 else {}  # rank 0 writes files
        self._offload = Offload([*self._wrapped, *built.towers], self._stepper and self._stepper.optimizer, platform)
        self.sleep(spec.offload)

    def sleep(self, parts: Collection[Part] = PARTS) -> int:
        """Free the device memory of these parts, now; the next operation that needs them wakes them. Bytes freed."""
        if self._images is not None and "params" in parts:
            self._images.forget()
        return self._offload.sleep(parts)

    def wake(self, parts: Iterable[Part] = PARTS) -> int:
        """Bring these parts back, bit for bit; gradients as zeros. Bytes taken."""
        return self._offload.wake(parts)

    @contextmanager
    def _awake(self, *parts: Part, active: bool = True) -> Iterator[None]:
        """Around an operation: the layout's groups are Megatron's, and these parts have their memory.

        active: off where the caller does other work meanwhile: Megatron's globals stay as they are.
        """
        self._offload.wake(parts)
        try:
            with self._groups.active() if active else nullcontext():
                yield
        finally:
            self.sleep(self._spec.offload)

    @property
    def config(self) -> ModelConfig:
        """The model, with the head that the role gave it."""
        return self._config

    @property
    def groups(self) -> Groups:
        """This rank's place in the role's layout."""
        return self._groups

    @property
    def num_steps(self) -> int:
        """Optimizer steps done; 0 for a frozen role."""
        return self._stepper.num_steps if self._stepper else 0

    def logprobs(self, shard: Shard, temperature: float | None = None, *, adapters: bool = True) -> Column | None:
        """Log-probs (natural) of every label: float32 [T] for each micro-batch; None on ranks without logits.

        temperature: the engine's where not given. adapters: off, the model is the one that LoRA began with.
        """
        with nullcontext() if adapters else adapters_off(self._chunks):
            scores = self.scores(shard, with_entropy=False, temperature=temperature)
        return None if scores is None else scores.logprobs

    def top(self, shard: Shard, k: int) -> Column | None:
        """The k likeliest labels, as `batch.joined_top` has them: [T, 2k + 1] for each micro-batch; None likewise."""

        def evaluate(batch: DeviceBatch, logits: Tensor) -> list[Tensor]:
            settings = {"vocab_size": self._config.vocab_size, "chunk_elements": self._chunk_elements}
            ids = vocab_parallel_top(logits, k, **settings, group=self._groups.tp)
            return [joined_top(ids, cast("Tensor", self._score(batch, logits, with_entropy=False, top_ids=ids).top))]

        return self._columns(shard, evaluate)[0]

    def values(self, shard: Shard) -> Column | None:
        """What the score head says: float32 [T] for each micro-batch; None on ranks without it.

        Position t speaks of the state after `tokens[t]`, from which `labels[t]` is predicted.
        Raises MegarlError where the role has a vocabulary.
        """
        if self._config.head != "score":
            raise MegarlError("A role with a vocabulary has no values: build it with head='score'.")
        return self._columns(shard, lambda _, output: [output[:, 0]])[0]

    def scores(self, shard: Shard, *, with_entropy: bool, temperature: float | None = None) -> ShardScores | None:
        """Log-probs, and entropies where asked for, of every label; no gradient. None on ranks without logits."""

        def evaluate(batch: DeviceBatch, logits: Tensor) -> list[Tensor]:
            scores = self._score(batch, logits, with_entropy=with_entropy, temperature=temperature)
            return [scores.logprobs] if scores.entropy is None else [scores.logprobs, scores.entropy]

        logprobs, *entropy = self._columns(shard, evaluate)
        return None if logprobs is None else ShardScores(logprobs, entropy[0] if entropy else None)

    def _columns(self, shard: Shard, evaluate: Callable[[DeviceBatch, Tensor], list[Tensor]]) -> list[Column | None]:
        """The columns that `evaluate` makes of each micro-batch's output; [None] on ranks without output. No gradient."""
        found: list[list[list[FloatArray]]] = []  # mini-batches, micro-batches, columns
        for chunk in self._wrapped:
            chunk.eval()
        with self._awake("params"), torch.no_grad(), self._counted(shard):
            for mini in shard.mini_batches:
                batches, bounds = self._to_device(mini, {})
                outputs = self._run(batches, evaluate, forward_only=True)
                pairs = zip(bounds, outputs, strict=self._groups.is_last_stage)
                found.append([[self._whole(part, each) for part in parts] for each, parts in pairs])
        if not self._groups.is_last_stage:
            return [None]
        num_columns = max((len(parts) for mini in found for parts in mini), default=1)
        return [[[parts[index] for parts in mini] for mini in found] for index in range(num_columns)]

    def _whole(self, part: Tensor, cu_seqlens: Bounds) -> FloatArray:
        """A column [T] of a micro-batch of these sequences from the parts of all context-parallel ranks."""
        layout, parts = self._groups.layout, [part]
        if layout.cp > 1:
            parts = [torch.empty_like(part) for _ in range(layout.cp)]
            dist.all_gather(parts, part.contiguous(), group=self._groups.cp)
        cut = cut_sequences(cu_seqlens, layout)
        return cut.gather([each.float().cpu().numpy() for each in parts], int(cu_seqlens[-1]))

    def _to_device(
        self, mini: MiniBatch, columns: dict[str, list[FloatArray]]
    ) -> tuple[list[DeviceBatch], list[Bounds]]:
        """Its micro-batches, and the cu_seqlens of each."""
        layout, rank = self._groups.layout, self._groups.place.cp
        batches, bounds = [], []
        for index, micro in enumerate(mini.micro_batches):
            mine = {name: column[index] for name, column in columns.items()}
            batches.append(to_device(micro, mine, self._device, layout, rank, self._config.vision))
            bounds.append(micro.cu_seqlens)
        return batches, bounds

    def update(self, shard: Shard, columns: dict[str, Column], loss: Loss) -> dict[str, float]:
        """One optimizer step for each mini-batch, in order; returns metrics over all of them and over all ranks.

        columns: label-aligned, as many micro-batches as the shard has; at least those that the loss reads. What it reads from
        the second optimizer step on may hold anything of the first mini-batch.
        Raises MegarlError when the role is frozen, a column is missing, or a gradient is not finite or a spike.
        """
        stepper, shares = self._require_stepper("update"), self._shares
        assert shares is not None
        loss.check(columns, len(shard.mini_batches))
        if not shard.mini_batches:
            return {}  # every group was dropped, on every rank: there is nothing to learn from in this step
        sums = MetricSums()
        steps = []
        for chunk in self._wrapped:
            chunk.train()
        with self._awake(*PARTS), self._counted(shard):
            for index, mini in enumerate(shard.mini_batches):
                batches, _ = self._to_device(mini, {name: columns[name][index] for name in loss.read(index)})
                stepper.zero_grad()
                self._accumulate_gradients(batches, loss, sums)
                sums.end_mini_batch()
                steps.append(stepper.step(self._groups.rank, shares.add))
            metrics = self._reduce(sums)
        taken = [step.grad_norm for step in steps if step.taken]
        if taken:
            metrics[f"{loss.group}/grad_norm"] = sum(taken) / len(taken)
            metrics[f"{loss.group}/grad_share_max"] = shares.report()
        return metrics | {f"{loss.group}/lr": steps[-1].lr, f"{loss.group}/skipped_steps": len(steps) - len(taken)}

    def take_notes(self) -> list[str]:
        """What a user should read of the updates since the last call; the same on every rank."""
        return [] if self._shares is None else self._shares.take_notes()

    def evaluate(self, shard: Shard, columns: dict[str, Column], loss: Loss) -> dict[str, float]:
        """What the loss reports of the shard's mini-batches, over all ranks; nothing is learned.

        Raises MegarlError when a column is missing.
        """
        loss.check(columns)
        sums = MetricSums()
        for chunk in self._wrapped:
            chunk.eval()
        with self._awake("params"), torch.no_grad(), self._counted(shard):
            for index, mini in enumerate(shard.mini_batches):
                batches, _ = self._to_device(mini, {name: columns[name][index] for name in loss.columns})
                self._run(batches, lambda batch, logits: self._apply(loss, batch, logits, sums), forward_only=True)
                sums.end_mini_batch()
            return self._reduce(sums)

    def _accumulate_gradients(self, batches: list[DeviceBatch], loss: Loss, sums: MetricSums) -> None:
        """Forward and backward over one mini-batch; then the gradients are summed over all ranks."""

        def evaluate(batch: DeviceBatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            output = self._apply(loss, batch, logits, sums)
            return output.loss, output.num_tokens.int(), {}

        if self._auxiliary is not None:
            self._auxiliary.count(batches, self._groups, self._device)
        if batches:
            self._run(batches, evaluate, forward_only=False)
        else:
            # The other ranks sum their gradients now, and wait for this one's zeros.
            self._chunks[0].config.finalize_model_grads_func(self._wrapped, pg_collection=self._groups.collection)

    def _apply(self, loss: Loss, batch: DeviceBatch, logits: Tensor, sums: MetricSums) -> LossOutput:
        """The loss of one micro-batch; what it reports is added to the sums."""
        if self._config.head == "score":
            scores = TokenScores(logits[:, 0], None)
        else:
            options = {"with_entropy": loss.with_entropy, "entropy_grad": loss.entropy_grad}
            scores = self._score(batch, logits, **options, top_ids=batch.top_ids)
        output = loss.fn(scores, batch)
        sums.add(output)
        return output

    def _run(self, batches: list[DeviceBatch], evaluate: Evaluate, *, forward_only: bool) -> list[Any]:
        with nullcontext() if self._replays is None else self._replays.pass_over():
            return run_schedule(
                self._wrapped, batches, evaluate, self._groups, forward_only=forward_only, prepare=self._prepare
            )

    def _counted(self, shard: Shard) -> AbstractContextManager[None]:
        """Around an operation that goes through the shard once: its forward passes are counted for who waits for it."""
        layout, sizes = self._groups.layout, [len(mini.micro_batches) for mini in shard.mini_batches]
        passes = sum(size + num_fillers(layout, size) for size in sizes) * layout.vpp
        return self._progress.of(passes, "micro-batches")

    def _prepare(self, model: Any, batch: DeviceBatch) -> Seen | None:
        """Before a forward pass: give the routers the rollout's choice; what it sees of images."""
        self._progress.advance()
        if self._replays is not None:
            mine = batch.routing_of(self._config.num_layers, self._groups.layout, self._groups.place.tp)
            self._replays.set(unwrap_model(model), mine)
        return None if self._images is None else self._images.of(batch)

    def _reduce(self, sums: MetricSums) -> dict[str, float]:
        """Metrics of the ranks that have logits, on every rank."""
        result = [sums.reduce(self._groups.dp_cp)] if self._groups.is_last_stage else [{}]
        if self._groups.layout.pp > 1:
            last = dist.get_global_rank(self._groups.pp, self._groups.layout.pp - 1)
            dist.broadcast_object_list(result, src=last, group=self._groups.pp)
        return result[0]

    def _score(
        self,
        batch: DeviceBatch,
        logits: Tensor,
        *,
        with_entropy: bool,
        entropy_grad: bool = False,
        temperature: float | None = None,
        top_ids: Tensor | None = None,
    ) -> TokenScores:
        return vocab_parallel_logprobs(
            logits,
            batch.labels,
            vocab_size=self._config.vocab_size,
            temperature=self._spec.temperature if temperature is None else temperature,
            group=self._groups.tp,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
            overwrite_logits=True,
            chunk_elements=self._chunk_elements,
            top_ids=top_ids,
        )

    def copy_from(self, other: Engine) -> None:
        """Take the weights of an engine of the same model and layout, bit for bit.

        Raises MegarlError where the layouts differ, where this one is in training, or where one alone has a vision tower in it.
        """
        if self._groups.layout != other._groups.layout:
            raise MegarlError(f"Weights of {other._groups.layout} cannot be copied into {self._groups.layout}.")
        if self._stepper is not None or self._config.vision != other._config.vision:
            raise MegarlError("Weights are copied into frozen roles only, and a tower's into one that has it too.")
        with other._awake("params"), self._awake("params"), torch.no_grad():
            for mine, theirs in zip(self._chunks, other._chunks, strict=True):
                for parameter, value in zip(mine.parameters(), theirs.parameters(), strict=True):
                    parameter.copy_(value)
        if self._images is not None:
            self._images.forget()  # what a tower saw with the weights before

    @contextmanager
    def gatherer(self) -> Iterator[Gatherer]:
        """Brings the weights under their HF names together on any rank: collective over the pool."""
        with self._awake("params", active=False):
            yield self._gatherer(*exported(self._chunks, self._config, self._spec))

    @contextmanager
    def pieces(self, bucket_bytes: int) -> Iterator[Pieces]:
        """What this rank writes of the same weights into memory that it shares with who takes them; nothing is gathered."""
        with self._awake("params", active=False):
            what, layout = exported(self._chunks, self._config, self._spec), self._groups.layout
            yield Pieces(self._chunks, self._config, layout, self._groups.rank, bucket_bytes, *what)

    def gradients(self, bucket_bytes: int) -> Iterator[Bucket]:
        """The gradients of the last update, after clipping, as `export_buckets` gives the weights.

        Whole only where the optimizer is not distributed (SGD), and none where gradients are offloaded between operations.
        """
        self._require_stepper("gradients")
        yield from export_buckets(self._gatherer(main_grad), bucket_bytes)

    def _gatherer(self, value: Value | None, dtypes: Mapping[str, torch.dtype] | None = None) -> Gatherer:
        layout = self._groups.layout
        pool = dist.group.WORLD if layout.world_size > 1 else None
        return Gatherer(self._chunks, self._config, layout, self._groups.rank, pool, value, dtypes)

    def export_adapters(self, folder: Path) -> None:
        """Write the LoRA adapters in PEFT's format. Collective; raises MegarlError where the role has none."""
        lora, layout = self._spec.lora, self._groups.layout
        if lora is None:
            raise MegarlError("The role has no adapters: build it with lora.")
        settings = LoraSettings(lora.rank, lora.alpha, lora.targets)
        pool = dist.group.WORLD if layout.world_size > 1 else None
        base = str(self._spec.folder)
        with self._awake("params"):
            save_peft(self._chunks, self._config, settings, layout, self._groups.rank, pool, folder, base_model=base)

    def save(self, folder: Path, *, async_save: bool = False) -> PendingSave | None:
        """Write weights and, of a role in training, optimizer and schedule; every rank calls it with the same empty folder.

        async_save: the files are written while training goes on; they are a checkpoint after `PendingSave.finish`.
        """
        meta = saved_by(self._spec, self._config, self._groups.layout, self.along)
        with self._awake("params", "optimizer"):
            return save_checkpoint(folder, self._chunks, *self._trained(), meta, async_save=async_save)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, at the same or another layout; every rank calls it."""
        with self._awake("params", "optimizer"):
            load_checkpoint(folder, self._config, self._chunks, *self._trained())
        if self._images is not None:
            self._images.forget()

    def _trained(self) -> tuple[Any, Any]:
        """Optimizer and schedule; None for a frozen role."""
        return (self._stepper.optimizer, self._stepper) if self._stepper else (None, None)

    def _require_stepper(self, operation: str) -> Stepper:
        if self._stepper is None:
            raise MegarlError(f"A frozen role has no {operation}: build it with an optimizer.")
        return self._stepper
