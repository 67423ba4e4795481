"""One model on one rank: log-probs, updates, weights out, state in and out. Megatron does the work.

It knows no Ray, no rollouts and no algorithms: it is given micro-batches, columns and a loss.
Import only after `models.bootstrap.prepare_megatron`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megarl.core.errors import MegarlError
from megarl.core.platform import Platform
from megarl.core.types import Column, FloatArray, MiniBatch, Shard
from megarl.models.gpt import build_gpt, packed_params
from megarl.models.config import ModelConfig
from megarl.models.hf_weights import Bucket, export_buckets, load_hf_weights
from megarl.recipe.schema import Optimizer
from megarl.training.batch import DeviceBatch, to_device
from megarl.training.checkpoint import load_checkpoint, save_checkpoint
from megarl.training.logprob import TokenScores, vocab_parallel_logprobs
from megarl.training.losses import Loss
from megarl.training.metrics import MetricSums
from megarl.training.optimizer import Stepper, is_distributed
from megarl.training.parallel import Groups

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
        folder: Path,
        groups: Groups,
        platform: Platform,
        *,
        dtype: str,
        temperature: float = 1.0,
        optimizer: Optimizer | None = None,
        total_steps: int = 1,
    ) -> None:
        """Build the model and load its weights from the HF folder.

        dtype: float32 or bfloat16, of the weights in forward and backward; Adam's main weights are always float32.
        temperature: divides the logits in every log-prob.
        total_steps: optimizer steps that the learning-rate schedule is laid out for.
        """
        self._config, self._groups, self._device = config, groups, platform.device
        self._dtype, self._temperature = DTYPES[dtype], temperature
        self._model = build_gpt(config, tp=groups.layout.tp, dtype=self._dtype, platform=platform)
        load_hf_weights(self._model, config, folder, groups.tp_rank, groups.layout.tp)
        is_bf16 = self._dtype == torch.bfloat16
        wrapped = Float16Module(self._model.config, self._model) if is_bf16 else self._model
        # Logits stay in the model's dtype: the log-prob casts them chunk by chunk.
        self._forward_options = {"fp32_output": False} if is_bf16 else {}
        self._stepper: Stepper | None = None
        if optimizer is None:
            self._wrapped = wrapped.requires_grad_(False)
        else:
            self._wrapped = self._data_parallel(wrapped, is_distributed(optimizer))
            self._stepper = Stepper(optimizer, self._wrapped, self._dtype, total_steps)

    def _data_parallel(self, model: torch.nn.Module, distributed_optimizer: bool) -> Any:
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer, average_in_collective=False
        )
        # The loss carries its denominator, so gradients are summed over data parallel and never rescaled.
        self._model.config.calculate_per_token_loss = True
        self._model.config.finalize_model_grads_func = _finalize_without_scaling
        return DistributedDataParallel(self._model.config, settings, model)

    @property
    def num_steps(self) -> int:
        """Optimizer steps done; 0 for a frozen role."""
        return self._stepper.num_steps if self._stepper else 0

    def logprobs(self, shard: Shard, temperature: float | None = None) -> Column:
        """Log-probs (natural) of every label: float32 [T] for each micro-batch. temperature: default, the engine's."""
        return self.scores(shard, with_entropy=False, temperature=temperature).logprobs

    def scores(self, shard: Shard, *, with_entropy: bool, temperature: float | None = None) -> ShardScores:
        """Log-probs, and entropies where asked for, of every label; no gradient."""
        logprobs: Column = []
        entropy: Column = []
        self._wrapped.eval()
        for mini in shard.mini_batches:
            batches = [to_device(micro, {}, self._device) for micro in mini.micro_batches]
            with torch.no_grad():
                scores = self._run(
                    batches,
                    partial(self._score, with_entropy=with_entropy, temperature=temperature),
                    forward_only=True,
                )
            logprobs.append([_to_numpy(score.logprobs) for score in scores])
            entropy.append([_to_numpy(score.entropy) for score in scores if score.entropy is not None])
        return ShardScores(logprobs, entropy if with_entropy else None)

    def update(self, shard: Shard, columns: dict[str, Column], loss: Loss) -> dict[str, float]:
        """One optimizer step for each mini-batch, in order; returns metrics over all of them and over all ranks.

        columns: label-aligned, as many micro-batches as the shard has; at least those that the loss reads.
        Raises MegarlError when the role is frozen, a column is missing, or a gradient is not finite.
        """
        stepper = self._require_stepper("update")
        missing = sorted(loss.columns - set(columns))
        if missing:
            raise MegarlError(f"The loss needs the columns {missing}; the update was given {sorted(columns)}.")
        if not shard.mini_batches:
            return {}  # every group was dropped, on every rank: there is nothing to learn from in this step
        sums = MetricSums()
        steps = []
        self._wrapped.train()
        for index, mini in enumerate(shard.mini_batches):
            batches = _with_columns(mini, {name: columns[name][index] for name in loss.columns}, self._device)
            stepper.zero_grad()
            self._accumulate_gradients(batches, loss, sums)
            sums.end_mini_batch()
            steps.append(stepper.step(self._groups.rank))
        return sums.reduce(self._groups.dp) | {
            "actor/grad_norm": sum(step.grad_norm for step in steps) / len(steps),
            "actor/lr": steps[-1].lr,
        }

    def _accumulate_gradients(self, batches: list[DeviceBatch], loss: Loss, sums: MetricSums) -> None:
        """Forward and backward over one mini-batch; then the gradients are summed over all ranks."""

        def evaluate(batch: DeviceBatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            scores = self._score(batch, logits, with_entropy=loss.with_entropy, entropy_grad=loss.entropy_grad)
            output = loss.fn(scores, batch)
            sums.add(output)
            return output.loss, output.num_tokens.int(), {}

        if batches:
            self._run(batches, evaluate, forward_only=False)
        else:
            # The other ranks sum their gradients now, and wait for this one's zeros.
            _finalize_without_scaling([self._wrapped])

    def _run(
        self, batches: list[DeviceBatch], evaluate: Callable[[DeviceBatch, Tensor], Any], *, forward_only: bool
    ) -> list[Any]:
        """Megatron's schedule over the micro-batches; `evaluate` gets each one's logits, [T, V / tp]."""
        if not batches:
            return []

        def forward_step(iterator: Iterator[DeviceBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(iterator)
            logits = model(
                batch.tokens[None],
                batch.positions[None],
                None,
                packed_seq_params=packed_params(batch.cu_seqlens),
                **self._forward_options,
            )

            def evaluate_output(output: Tensor, non_loss_data: bool = False) -> Any:
                return evaluate(batch, output[0])

            return logits, evaluate_output

        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=self._wrapped,
            num_microbatches=len(batches),
            seq_length=max(batch.num_tokens for batch in batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results

    def _score(
        self,
        batch: DeviceBatch,
        logits: Tensor,
        *,
        with_entropy: bool,
        entropy_grad: bool = False,
        temperature: float | None = None,
    ) -> TokenScores:
        return vocab_parallel_logprobs(
            logits,
            batch.labels,
            vocab_size=self._config.vocab_size,
            temperature=self._temperature if temperature is None else temperature,
            group=self._groups.tp,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
        )

    def buckets(self, bucket_bytes: int) -> Iterator[Bucket]:
        """The weights under their HF names, gathered over tensor parallel, about so many bytes at a time.

        Every rank of a tensor-parallel group has to take every bucket: gathering is collective.
        """
        return export_buckets(self._model, self._config, self._groups.tp, bucket_bytes)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and schedule; every rank calls it with the same existing folder."""
        stepper = self._require_stepper("save")
        save_checkpoint(folder, self._model, stepper.optimizer, stepper.scheduler)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, at the same or another layout; every rank calls it."""
        stepper = self._require_stepper("load")
        load_checkpoint(folder, self._model, stepper.optimizer, stepper.scheduler)

    def _require_stepper(self, operation: str) -> Stepper:
        if self._stepper is None:
            raise MegarlError(f"A frozen role has no {operation}: build it with an optimizer.")
        return self._stepper


def _finalize_without_scaling(model: list[Any], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Sum gradients over the ranks. Megatron would divide by num_tokens; our weights have done that already."""
    finalize_model_grads(model, None, **groups)


def _with_columns(mini: MiniBatch, columns: dict[str, list[FloatArray]], device: str) -> list[DeviceBatch]:
    return [
        to_device(micro, {name: column[index] for name, column in columns.items()}, device)
        for index, micro in enumerate(mini.micro_batches)
    ]


def _to_numpy(values: Tensor) -> FloatArray:
    return values.float().cpu().numpy()
