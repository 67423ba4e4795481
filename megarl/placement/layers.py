"""Seconds of one micro-batch on one rank, part by part: layers without and with experts, the model's ends, the rank itself.

A layer costs its products and the bytes beside them (see `roofline`), what its launches take beyond that, and the collectives of
tensor, context and expert parallel. How ranks of a pipeline are made of these, and wait for each other, is `compute`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megarl.models.config import ModelConfig
from megarl.models.flops import forward_flops
from megarl.placement.cluster import Cluster
from megarl.placement.links import all_gather_s, all_to_all_s, send_s
from megarl.placement.roofline import (
    ATTENTION_BACKWARD,
    LOGIT_BYTES,
    attention_elements,
    attention_products,
    chunked_multiplications,
    expert_elements,
    mlp_products,
    training_roof,
)
from megarl.placement.sizes import adapter_sizes, linear_share, model_sizes, routed_adapter_sizes
from megarl.placement.space import Layouts
from megarl.placement.stages import Stage, stages
from megarl.placement.workload import Workload
from megarl.recipe.roles import Lora

# Gradients are summed in float32.
GRADIENT_BYTES = 4
# Backward multiplies twice for each multiplication of the forward pass, and moves twice the bytes.
BACKWARD = 2
# Collectives of tensor parallel with sequence parallel, of one layer's two halves: each gathers its input and scatters its
# output; backward gathers the inputs once more for the gradients of the weights (arXiv 2205.05198), which frozen ones have not.
GATHERS, GATHERS_BACKWARD = 2, 3


@dataclass(frozen=True)
class Pass:
    """[N] seconds of one micro-batch in something, in one direction or several."""

    compute: Any
    launch: Any
    tensor: Any
    context: Any
    expert: Any
    pipeline: Any

    def plus(self, other: Pass, times: Any = 1.0) -> Pass:
        """This and so many times the other."""
        return Pass(**{name: mine + times * getattr(other, name) for name, mine in vars(self).items()})

    def times(self, factor: Any) -> Pass:
        """So many times this."""
        return Pass(**{name: seconds * factor for name, seconds in vars(self).items()})

    @property
    def total(self) -> Any:
        """All of it."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Parts:
    """What a micro-batch costs in everything that ranks of a pipeline are made of.

    dense, expert: one layer without and with experts. embedding, head: the model's ends. stage: a rank itself, whatever it holds.
    """

    dense: Pass
    expert: Pass
    embedding: Pass
    head: Pass
    stage: Pass

    def plus(self, other: Parts) -> Parts:
        """Both after one another."""
        return Parts(**{name: mine.plus(getattr(other, name)) for name, mine in vars(self).items()})

    def on(self, stage: Stage) -> Pass:
        """On one rank."""
        held = self.dense.times(stage.layers - stage.moe_layers).plus(self.expert, stage.moe_layers)
        return held.plus(self.embedding, stage.embedding).plus(self.head, stage.head).plus(self.stage)

    def total_on(self, stage: Stage) -> Any:
        """[N] seconds on one rank."""
        layers = (stage.layers - stage.moe_layers) * self.dense.total + stage.moe_layers * self.expert.total
        return layers + stage.embedding * self.embedding.total + stage.head * self.head.total + self.stage.total


def micro_batch(
    config: ModelConfig,
    choice: Layouts,
    tokens: Any,
    workload: Workload,
    cluster: Cluster,
    *,
    head: bool,
    lora: Lora | None = None,
) -> tuple[Parts, Parts, Parts]:
    """One micro-batch forward, backward, and what recompute adds to the latter. tokens: [N] on a data-parallel rank.

    lora: adapters that alone are trained. What they multiply themselves is left out, as in `models.flops`.
    """
    here, moe = tokens / choice.cp, config.moe is not None and bool(config.moe_layers)
    frozen = lora is not None
    dense = _dense_layer(config, choice, tokens, workload, cluster, frozen)
    expert = _expert_layer(config, choice, tokens, workload, cluster, frozen) if moe else (_only_compute(0.0),) * 2
    width = here / choice.tp * config.hidden_size * workload.bytes_each
    # Every virtual stage sends to the next one.
    send = np.where(choice.pp > 1, send_s(cluster, width, choice.devices // choice.pp), 0.0) * choice.vpp
    micro_s = cluster.rates.micro_s * choice.vpp
    nothing = _only_compute(0.0)
    product, logits = _head_seconds(config, choice, here, workload, cluster) if head else (0.0, 0.0)
    head_s = _only_compute(product + logits)
    forward = Parts(dense[0], expert[0], nothing, head_s, _only_compute(0.0, launch=micro_s, pipeline=send))
    added = _summed_gradients(config, choice, workload, cluster, lora)
    end = _only_compute(added.end)
    # A tied matrix has one gradient where one rank has both ends.
    tied_once = np.where((choice.pp == 1) & config.tied_embeddings, 0.0, 1.0)
    backward = Parts(
        dense[1].plus(_only_compute(added.dense)),
        expert[1].plus(_only_compute(added.expert)),
        end,
        _only_compute(_backward(product, logits, frozen)).plus(end, tied_once) if head else nothing,
        _only_compute(0.0, launch=BACKWARD * micro_s, pipeline=send),
    )
    attention = _attention_seconds(config, choice, here, workload, cluster)[0] * (choice.recompute == 1)
    # Of the fullest rank, which the others wait for.
    full = choice.again(np.max([stage.layers for stage in stages(config, choice)], axis=0))
    again = (layer[0].times(full).plus(_only_compute(attention)) for layer in (dense, expert))
    return forward, backward, Parts(next(again), next(again), nothing, nothing, nothing)


@dataclass(frozen=True)
class _Added:
    """[N] seconds of adding a micro-batch's gradients to those before, for a layer of either kind and for one end."""

    dense: Any
    expert: Any
    end: Any


def _summed_gradients(
    config: ModelConfig, choice: Layouts, workload: Workload, cluster: Cluster, lora: Lora | None
) -> _Added:
    """Read in the model's dtype, read and written in float32."""
    sizes, roof = model_sizes(config), training_roof(cluster, workload.dtype)
    each = (workload.bytes_each + 2 * GRADIENT_BYTES) / roof.bytes_s
    if lora is not None:
        dense, expert = (adapter_sizes(config, lora, choice.tp, 1, moe) * each for moe in (0, 1))
        routed = routed_adapter_sizes(config, lora, choice.ep, choice.etp, 1) * each
        return _Added(dense, expert + routed, 0.0)
    return _Added(
        dense=(sizes.attention + sizes.dense_mlp) / choice.tp * each,
        expert=((sizes.attention + sizes.shared) / choice.tp + sizes.routed / (choice.ep * choice.etp)) * each,
        end=sizes.embedding / choice.tp * each,
    )


def _backward(products: Any, beside: Any, frozen: bool) -> Any:
    """Seconds backward of what takes so many forward. frozen: weights have no gradients, and inputs alone are multiplied for."""
    return products * (1 if frozen else BACKWARD) + BACKWARD * beside


def _only_compute(compute: Any, launch: Any = 0.0, pipeline: Any = 0.0) -> Pass:
    return Pass(compute=compute, launch=launch, tensor=0.0, context=0.0, expert=0.0, pipeline=pipeline)


def _dense_layer(
    config: ModelConfig, choice: Layouts, tokens: Any, workload: Workload, cluster: Cluster, frozen: bool
) -> tuple[Pass, Pass]:
    """Forward and backward of one layer without experts."""
    here, each, roof, rates = (
        tokens / choice.cp,
        workload.bytes_each,
        training_roof(cluster, workload.dtype),
        cluster.rates,
    )
    products = attention_products(config, choice.tp) + mlp_products(
        config.hidden_size, config.ffn_hidden_size, choice.tp, config.halves
    )
    elements = attention_elements(config, choice.tp) + (config.halves + 1) * config.ffn_hidden_size / choice.tp
    multiplied = roof.products_s(here, products, each, each)
    beside = here * elements * each * rates.traffic / roof.bytes_s
    attention, attention_backward = _attention_seconds(config, choice, here, workload, cluster)
    gather = all_gather_s(cluster, here * config.hidden_size * each, choice.tp, 1)
    launch = rates.layer_s + _sequence_launch(choice, tokens, workload, cluster)
    context = _context_seconds(config, choice, tokens, workload, cluster)
    return (
        _layer(multiplied + beside + attention, launch, 2 * GATHERS * gather, context, cluster),
        _layer(
            _backward(multiplied, beside, frozen) + attention_backward,
            BACKWARD * launch,
            2 * (GATHERS if frozen else GATHERS_BACKWARD) * gather,
            2 * context,
            cluster,
        ),
    )


def _layer(compute: Any, launch: Any, tensor: Any, context: Any, cluster: Cluster) -> Pass:
    """One layer in one direction. Where the host runs ahead, launching takes only what the device does not need anyway."""
    if cluster.device.queues:
        launch = np.maximum(launch - compute - tensor - context, 0.0)
    return Pass(compute=compute, launch=launch, tensor=tensor, context=context, expert=0.0, pipeline=0.0)


def _expert_layer(
    config: ModelConfig, choice: Layouts, tokens: Any, workload: Workload, cluster: Cluster, frozen: bool
) -> tuple[Pass, Pass]:
    """Forward and backward of one layer with experts: tokens go out to them and come back, and the host waits for counts."""
    moe, rates, each = config.moe, cluster.rates, workload.bytes_each
    assert moe is not None
    hidden, here, roof = config.hidden_size, tokens / choice.cp, training_roof(cluster, workload.dtype)
    own_tokens = here / choice.tp
    sent = own_tokens * moe.top_k
    local = moe.num_experts / choice.ep
    # Of ranks that share an expert's columns each has the rows of all; the rows of each expert are padded to whole tiles.
    rows = np.ceil(sent * choice.etp / local / cluster.device.tile_rows) * cluster.device.tile_rows
    experts = local * roof.products_s(rows, mlp_products(hidden, moe.ffn_hidden_size, choice.etp), each, each)
    experts = experts + roof.product_s(own_tokens, hidden, moe.num_experts, each, each)
    products = attention_products(config, choice.tp) + mlp_products(hidden, moe.shared_ffn_hidden_size, choice.tp)
    elements = here * attention_elements(config, choice.tp) + sent * expert_elements(hidden, moe.ffn_hidden_size)
    multiplied = experts + roof.products_s(here, products, each, each)
    beside = elements * each * rates.traffic / roof.bytes_s
    attention, attention_backward = _attention_seconds(config, choice, here, workload, cluster)
    gather = all_gather_s(cluster, here * hidden * each, choice.tp, 1)
    context = _context_seconds(config, choice, tokens, workload, cluster)
    launch = rates.expert_layer_s + _sequence_launch(choice, tokens, workload, cluster)
    exchange = 2 * all_to_all_s(cluster, sent * hidden * each, choice.ep, choice.etp) + np.zeros(len(choice))
    # What shares an expert's columns gathers the rows of all that do, and scatters the sums of what comes out.
    exchange = exchange + 2 * all_gather_s(cluster, sent * choice.etp * hidden * each, choice.etp, 1)
    # Of the two halves only attention is cut by tensor parallel.
    forward = Pass(multiplied + beside + attention, launch, GATHERS * gather, context, exchange, 0.0)
    backward = Pass(
        compute=_backward(multiplied, beside, frozen) + attention_backward,
        launch=BACKWARD * launch,
        tensor=(GATHERS if frozen else GATHERS_BACKWARD) * gather,
        context=2 * context,
        expert=exchange,
        pipeline=0.0,
    )
    return forward, backward


def _sequence_launch(choice: Layouts, tokens: Any, workload: Workload, cluster: Cluster) -> Any:
    sequences = tokens / (workload.prompt_tokens + workload.responses.mean)
    return sequences * np.where(choice.cp > 1, cluster.rates.cut_sequence_s, cluster.rates.sequence_s)


def _context_seconds(config: ModelConfig, choice: Layouts, tokens: Any, workload: Workload, cluster: Cluster) -> Any:
    """Keys and values of one layer, gathered."""
    wide = sum(share * kind.num_kv_heads * kind.head_dim for share, kind in config.kinds_of_heads)
    kv = 2 * wide * workload.bytes_each / choice.tp
    return all_gather_s(cluster, tokens * kv, choice.cp, choice.tp) * (choice.cp > 1)


def _attention_seconds(
    config: ModelConfig, choice: Layouts, here: Any, workload: Workload, cluster: Cluster
) -> tuple[Any, Any]:
    """The core of one layer's attention, forward and backward; where some layers' is linear, of a layer on average.

    That is multiplied in float32, by torch (models/delta_net.py), which keeps what backward needs of it.
    """
    lengths = np.maximum(np.round(workload.responses.grid + workload.prompt_tokens), 1).astype(np.int64)
    own, device = here / choice.tp, cluster.device
    each = forward_flops(replace(config, delta=None), lengths).attention / float(lengths.sum()) / config.num_layers
    full = own * each / (device.product_flops(workload.dtype) * cluster.rates.attention)
    if config.delta is None:
        return full, ATTENTION_BACKWARD * full
    chunked = 2 * linear_share(config) * chunked_multiplications(config.delta)
    linear = own * chunked / (device.product_flops("float32") * cluster.rates.attention)
    return full + linear, ATTENTION_BACKWARD * full + BACKWARD * linear


def _head_seconds(
    config: ModelConfig, choice: Layouts, here: Any, workload: Workload, cluster: Cluster
) -> tuple[Any, Any]:
    """The vocabulary's product, and what reads its logits, forward."""
    columns, roof, each = config.vocab_size / choice.tp, training_roof(cluster, workload.dtype), workload.bytes_each
    product = roof.product_s(here, config.hidden_size, columns, each, each)
    return product, here * columns * LOGIT_BYTES / roof.bytes_s
