"""Runs Megarl's micro-batches through Megatron's schedule of forward and backward passes, whatever the pipeline.

It knows process groups and model chunks, no losses: what to do with the logits is the caller's function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from torch import Tensor

from megarl.core.layout import Layout
from megarl.models.packed import packed_params
from megarl.models.seen import Seen
from megarl.training.batch import DeviceBatch, filler
from megarl.training.parallel import Groups

# Called before each forward pass of a model chunk. Returns what the pass sees of images.
Prepare = Callable[[Any, DeviceBatch], Seen | None]
# Gets a micro-batch and its logits, [T, V / tp]. Training: (loss, tokens, {}); otherwise whatever is to be collected.
Evaluate = Callable[[DeviceBatch, Tensor], Any]


def run_schedule(
    chunks: Sequence[Any],
    batches: Sequence[DeviceBatch],
    evaluate: Evaluate,
    groups: Groups,
    *,
    forward_only: bool,
    prepare: Prepare | None = None,
) -> list[Any]:
    """All micro-batches forward and, unless `forward_only`, backward; then gradients are summed over the ranks.

    Returns what `evaluate` gave, one a micro-batch; nothing on ranks that have no logits.
    """
    if not batches:
        return []
    layout, config = groups.layout, chunks[0].config
    columns, device = batches[0].columns, str(batches[0].tokens.device)
    fed = [*batches, *(filler(device, layout, columns) for _ in range(num_fillers(layout, len(batches))))]
    schedule = get_forward_backward_func(layout.pp, layout.vpp if layout.vpp > 1 else None)
    iterators = [iter(fed) for _ in chunks]
    results: list[Any] = schedule(
        # Logits stay in the model's dtype: the log-prob casts them chunk by chunk.
        forward_step_func=_forward_step(evaluate, prepare, layout.cp, {"fp32_output": False} if config.bf16 else {}),
        data_iterator=iterators if layout.vpp > 1 else iterators[0],
        model=list(chunks) if layout.vpp > 1 else chunks[0],
        num_microbatches=len(fed),
        seq_length=max(batch.num_tokens for batch in fed) * layout.cp,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        p2p_communicator=P2PCommunicator(groups.pp, config),
        pg_collection=groups.collection,
    )
    return results[: len(batches)]


def num_fillers(layout: Layout, num_micro_batches: int) -> int:
    """How many micro-batches that count for nothing the schedule of a mini-batch needs beside its own."""
    # The interleaved schedule goes through groups of as many micro-batches as there are pipeline ranks.
    return -num_micro_batches % layout.pp if layout.vpp > 1 else 0


def _forward_step(evaluate: Evaluate, prepare: Prepare | None, cp: int, options: dict[str, Any]) -> Callable[..., Any]:
    def forward_step(iterator: Iterator[DeviceBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(iterator)
        seen = None if prepare is None else prepare(model, batch)
        output = model(
            batch.tokens[None],
            batch.positions[None],
            None,
            packed_seq_params=packed_params(batch.cu_seqlens, cp, batch.host_bounds, seen),
            **options,
        )

        def evaluate_output(logits: Tensor, non_loss_data: bool = False) -> Any:
            return evaluate(batch, logits.squeeze(0))

        return output, evaluate_output

    return forward_step


def finalize_without_scaling(model: list[Any], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Sum gradients over the ranks. Megatron would divide by num_tokens; our weights have done that already."""
    finalize_model_grads(model, None, **groups)


class AuxiliaryScale:
    """Gives auxiliary losses of experts the share of a mean over the mini-batch's tokens.

    Megatron multiplies the auxiliary loss of a micro-batch by the tokens that are on the rank, and expects gradients to be
    divided by all tokens later. Ours are not: the policy loss carries its denominator in its weights. So the division is
    done here. The ranks that share a sequence each hold a part of the auxiliary loss as well as of the tokens, so that
    their parts add up to it only when each is multiplied by the tokens of all of them.
    """

    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, value: Tensor) -> Tensor:
        """Megatron's `grad_scale_func`: it is asked for the scale of auxiliary losses, by ones, and of the loss itself."""
        return value if value.requires_grad else value * self.scale

    def count(self, batches: Sequence[DeviceBatch], groups: Groups, device: str) -> None:
        """Count the tokens of a mini-batch over all ranks; collective. device: of this rank, which may have no batches.

        Megatron also writes auxiliary losses into a table of this process, which nobody here reads. It has a place for each layer
        of the first model that wrote there, and a deeper one would find none: each mini-batch begins a table of its own.
        """
        get_moe_layer_wise_logging_tracker().clear()
        total = torch.tensor([sum(batch.num_tokens for batch in batches)], dtype=torch.int64, device=device)
        torch.distributed.all_reduce(total, group=groups.dp_cp)
        layout = groups.layout
        num_sharing = layout.cp * (layout.tp if layout.sequence_parallel else 1)
        self.scale = num_sharing / max(1, int(total.item()))
