"""Bytes that one device holds for a role: weights, gradients, optimizer state, activations, logits; a server's cache.

Every term is what the engine does (training/build.py, schedule.py, logprob.py, optimizer.py): weights in the run's dtype,
gradients summed in float32, float32 master weights and Adam's moments split over the data-parallel ranks (ZeRO stage 1, arXiv
1910.02054; experts over the ranks that hold the same ones), and of a micro-batch the fullest of the moments that it goes through.
What a layer holds is `activations`', what a pipeline rank has of the model is `stages`'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megarl.models.config import ModelConfig
from megarl.placement.activations import Counting
from megarl.placement.cluster import Cluster
from megarl.placement.devices import Kernels
from megarl.placement.layers import GRADIENT_BYTES
from megarl.placement.server_share import beside_bytes, share_bytes
from megarl.placement.sizes import Sizes, adapter_sizes, kv_bytes, model_sizes, routed_adapter_sizes, whole_parameters
from megarl.placement.space import FULL, Layouts, Servers
from megarl.placement.stages import Stage, stages
from megarl.placement.states import StatePool, slots_in, state_bytes
from megarl.recipe.roles import Lora

# Master weights where the weights themselves are not float32, and Adam's two moments.
MASTER_BYTES, MOMENT_BYTES = 4, 8
# What a role that is offloaded leaves on the device: caches, small buffers.
OFFLOADED_SHARE = 0.02
FLOAT = 4
KEPT_FEATURES = 2**29  # of the last images (models/vision_tower.py)


@dataclass(frozen=True)
class RoleBytes:
    """[N] bytes on the fullest device of one role.

    activations: of the micro-batches that are alive, and what a layer's backward pass takes on top. logits: with their
    gradient, their chunks in float32, and the output matrix's gradient; 0 where the fullest moment is another. exchange: what
    ranks hold to send to one another (placement/communicators.py), also while the role is offloaded.
    """

    weights: Any
    gradients: Any
    optimizer: Any
    activations: Any
    logits: Any
    exchange: Any = 0.0

    @property
    def state(self) -> Any:
        """What stays from one micro-batch to the next."""
        return self.weights + self.gradients + self.optimizer + self.exchange

    @property
    def working(self) -> Any:
        """What a micro-batch takes on top."""
        return self.activations + self.logits

    @property
    def moved(self) -> Any:
        """What goes to the host and comes back when the role is offloaded: gradients are made anew."""
        return self.weights + self.optimizer


@dataclass(frozen=True)
class Shown:
    """The images that a vision tower learns from. squares: of the largest. images: of a mini-batch, each counted once.

    samples: of a mini-batch, among which its images are.
    """

    squares: float
    images: float
    samples: float


@dataclass(frozen=True)
class Role:
    """How a role uses its model.

    trained: else it is frozen. head: whether it has an output matrix; a critic has one row. sharded: whether data-parallel
    ranks share out the optimizer's state. lora: adapters that alone are trained. shares: whether the weights are another
    role's, as those of LoRA's reference are. sequence: tokens of the longest sequence of a micro-batch; None: as
    long as the micro-batch. mean: tokens of a sequence, to which its padding comes; None: nothing is padded. passes: whether one
    that is trained also goes over its micro-batches without gradients. shown: of a vision tower that learns; None: it is frozen.
    """

    trained: bool
    head: bool
    sharded: bool = True
    lora: Lora | None = None
    shares: bool = False
    sequence: float | None = None
    mean: float | None = None
    passes: bool = False
    shown: Shown | None = None


def role_bytes(
    config: ModelConfig,
    choice: Layouts,
    bytes_each: int,
    role: Role,
    kernels: Kernels = Kernels(),  # noqa: B008
) -> RoleBytes:
    """Bytes of a Megatron role under every choice, on its fullest pipeline rank. kernels: default: those of a GPU."""
    sequence = choice.micro_tokens if role.sequence is None else np.minimum(role.sequence, choice.micro_tokens)
    padded = 1.0 if role.mean is None else 1 + choice.padding / role.mean
    lora = role.lora if role.trained else None

    def fullest(kernels: Kernels) -> RoleBytes:
        counting = Counting(config, choice, bytes_each, kernels, sequence, lora, padded)
        each = [_stage_bytes(counting, stage, role) for stage in stages(config, choice)]
        most = np.argmax([one.state + one.working for one in each], axis=0)
        return RoleBytes(**{name: np.choose(most, [getattr(one, name) for one in each]) for name in vars(each[0])})

    found = fullest(kernels)
    if config.window is None or not kernels.fused:
        return found
    cut = fullest(replace(kernels, fused=False))  # Transformer Engine has no window under context parallel
    return RoleBytes(
        **{name: np.where(choice.cp > 1, getattr(cut, name), whole) for name, whole in vars(found).items()}
    )


def top_bytes(choice: Layouts, k: int, mini_batch: float) -> Any:
    """[N] bytes of the column of a teacher's k likeliest tokens (training/batch.py), 2k + 1 floats a token.

    A rank, of whichever stage, has it of its part of a whole mini-batch at once. mini_batch: tokens.
    """
    return FLOAT * (2 * k + 1) * mini_batch / (choice.dp * choice.cp)


def _tower(counting: Counting, stage: Stage) -> Any:
    """Numbers of a vision tower's weights, of which each rank of the first stage has all; not counted where later ones do."""
    vision = counting.config.vision
    return 0 if vision is None else stage.embedding * vision.tower_elements


def _learning(counting: Counting, stage: Stage, shown: Shown) -> tuple[Any, Any]:
    """Of a vision tower that learns: bytes of one image's backward pass, and of what a mini-batch asks of all its images.

    Features of all of them are kept, and their gradients added up in float32 (training/image_features.py); each is taken to be
    as large as the largest. The layers' activations are gone by the time of the tower's.
    """
    config, choice = counting.config, counting.choice
    vision = config.vision
    assert vision is not None and vision.shape is not None
    again, once = (vision.shape.backward_bytes(shown.squares, counting.each, again=each) for each in (True, False))
    images = np.minimum(np.ceil(shown.images), np.ceil(shown.samples / choice.dp))
    features = images * shown.squares * (1 + vision.deepstack) * config.hidden_size
    kept = np.minimum(features * counting.each, KEPT_FEATURES)
    backward = np.where(choice.recompute == FULL, again, once)
    return stage.embedding * backward, stage.embedding * (features * FLOAT + kept)


def _stage_bytes(counting: Counting, stage: Stage, role: Role) -> RoleBytes:
    choice, zero = counting.choice, np.zeros(len(counting.choice))
    sizes = model_sizes(counting.config, head=role.head)
    dense, routed = stage.parameters(sizes)
    whole = whole_parameters(counting.config, stage.layers, stage.moe_layers, fused=counting.fused)
    dense, routed = (dense - whole) / choice.tp + whole, routed / (choice.ep * choice.etp)
    weights = zero if role.shares else (dense + routed + _tower(counting, stage)) * counting.each
    if not role.trained:
        return RoleBytes(weights, zero, zero, *_passing(counting, stage, role))
    if role.lora is not None:
        dense = adapter_sizes(counting.config, role.lora, choice.tp, stage.layers, stage.moe_layers)
        routed = routed_adapter_sizes(counting.config, role.lora, choice.ep, choice.etp, stage.moe_layers) + zero
        weights = weights + (dense + routed) * counting.each
    tower = zero
    if role.shown is not None:
        dense = dense + _tower(counting, stage)
        tower, asked = _learning(counting, stage, role.shown)
    master = MASTER_BYTES * (counting.each < MASTER_BYTES) + MOMENT_BYTES
    activations, logits = _training(counting, stage, role, sizes)
    if role.passes:
        # Where layers keep little, the logits decide: of a pass without gradients there are two micro-batches' at once.
        passing, more = _passing(counting, stage, role)
        fuller = passing + more > activations + logits
        activations, logits = np.where(fuller, passing, activations), np.where(fuller, more, logits)
    # Gradients are summed when no activations are left, those of experts by themselves.
    summed = np.maximum(dense * (choice.dp * choice.cp > 1), routed * (choice.edp > 1)) * GRADIENT_BYTES
    summed = summed * (counting.kernels.sums_in_copies and role.sharded)
    activations = np.maximum(activations, np.maximum(summed, tower) - logits)
    if role.shown is not None:
        activations = activations + asked
    return RoleBytes(
        weights,
        (dense + routed) * GRADIENT_BYTES,
        master * (dense / (choice.dp * choice.cp) + routed / choice.edp if role.sharded else dense + routed),
        activations,
        logits,
    )


def _training(counting: Counting, stage: Stage, role: Role, sizes: Sizes) -> tuple[Any, Any]:
    """Activations and logits of training at the fullest moment of a micro-batch."""
    config, choice, hidden, full = counting.config, counting.choice, counting.hidden, counting.choice.recompute == FULL
    gathered = hidden * choice.tp * choice.sequence_parallel
    body, layer = _layers(counting, stage)
    norm = stage.head * counting.norm(config.hidden_size, output=role.lora is None)
    body = body + gathered + np.where(full, hidden, 0)
    if role.lora is not None:
        # The embedding is where gradients end: its output and their sum stay until the next micro-batch's.
        body = body + 2 * hidden * stage.embedding
    body = body + stage.alive * hidden * (choice.pp > 1) * (1 - stage.head)  # a pipeline's rank keeps what it sent
    output = sizes.embedding / choice.tp * counting.each * (role.lora is None)
    # A tied matrix's gradient of the output waits for that of the embedding.
    tied = output * stage.head * stage.embedding * (sizes.tied and role.head)
    columns = stage.head * role.head * config.vocab_size / choice.tp
    # Where they are capped, what the tangent gives is kept beside them.
    logits = counting.tokens * columns * counting.each * (1 + (config.logit_cap is not None))
    chunks = 2 * _chunk(counting, columns)
    whole = counting.tokens * config.hidden_size * counting.each
    loss = np.maximum(chunks, stage.head * role.head * (whole + output))
    inside = body + np.maximum(layer, norm) + tied
    # There both are summed into a third.
    ends = body * (stage.alive - 1) / stage.alive + whole + stage.embedding * output + 2 * tied
    inside = np.maximum(inside, ends)
    at_logits = body + norm + logits + loss
    logits = np.where(at_logits > inside, logits + loss, 0)
    return np.maximum(at_logits, inside) - logits, logits


def _layers(counting: Counting, stage: Stage) -> tuple[Any, Any]:
    """Bytes that all layers keep, and what one takes beside them in its backward pass; recomputed layers keep their inputs.

    Those are a stage's first: when their turn comes, the others have let go of what they kept.
    """
    again = counting.choice.again(np.maximum(stage.layers, 1))
    kinds = [(stage.layers - stage.moe_layers, counting.dense)]
    if counting.config.moe is not None:
        kinds.append((stage.moe_layers, counting.experts))
    kept = (1 - again) * sum(number * layer.kept for number, layer in kinds)
    late = [(number > 0) * layer.extra for number, layer in kinds]
    early = [(number > 0) * (again > 0) * (layer.extra + layer.kept - kept) for number, layer in kinds]
    return stage.alive * (kept + again * stage.layers * counting.hidden), np.max([*late, *early], axis=0)


def _passing(counting: Counting, stage: Stage, role: Role) -> tuple[Any, Any]:
    """Activations and logits of a pass without gradients, at its fullest moment."""
    config, choice = counting.config, counting.choice
    kinds = [(stage.layers - stage.moe_layers, counting.dense)]
    if config.moe is not None:
        kinds.append((stage.moe_layers, counting.experts))
    layer = np.max([(number > 0) * kind.forward for number, kind in kinds], axis=0)
    columns = stage.head * role.head * config.vocab_size / choice.tp
    gathered = counting.tokens * config.hidden_size * counting.each * choice.sequence_parallel
    logits = counting.tokens * columns * counting.each
    # The schedule holds what the micro-batch before put out until this one's is there.
    layer = layer + gathered + np.where(stage.head * role.head > 0, 0, counting.hidden * (choice.pp > 1))
    ends = 2 * counting.hidden + gathered
    at_logits = ends + (2 + (config.logit_cap is not None)) * logits + _chunk(counting, columns)
    inside = layer + logits
    logits = np.where(at_logits > inside, at_logits - ends, logits)
    return np.maximum(at_logits, inside) - logits, logits


def _chunk(counting: Counting, columns: Any) -> Any:
    """One temporary of the log-probs (training/logprob.py): rows of so many columns, in float32."""
    rows = np.maximum(1, counting.kernels.chunk_elements // np.maximum(columns, 1))
    return FLOAT * columns * np.minimum(counting.tokens, rows)


@dataclass(frozen=True)
class ServerBytes:
    """[N] bytes on one device of a server.

    cache: keys and values. states: of linear attention. cache_tokens: tokens that the whole server's KV cache holds.
    most_running: sequences that it has states for; infinite where it needs none.
    """

    weights: Any
    cache: Any
    states: Any
    other: Any
    cache_tokens: Any
    most_running: Any

    @property
    def total(self) -> Any:
        """All that it holds while awake."""
        return self.weights + self.cache + self.states + self.other


def server_bytes(
    config: ModelConfig,
    choice: Servers,
    cluster: Cluster,
    bytes_each: int,
    whole: float | None = None,
    most_tokens: int | None = None,
    pool: StatePool = StatePool(),  # noqa: B008
) -> ServerBytes:
    """Bytes of a server under every choice: what its share leaves beside the weights is KV cache, and states.

    bytes_each: of one element of the cache. whole: of all weights; default: as many bytes for each of them. most_tokens: that
    the cache is told to hold: SGLang takes the less of them and its share; where processes stand for devices, just them.
    pool: of states.
    """
    total = model_sizes(config).total
    whole = total * bytes_each if whole is None else whole
    # SGLang has routers, and what compresses into latents, on every rank of a server.
    uncut = whole / total * whole_parameters(config, config.num_layers, len(config.moe_layers), fused=True)
    weights = uncut + (whole - uncut) / choice.tp
    room = np.maximum(share_bytes(choice, cluster) - weights, 0.0)
    states, most_running = np.zeros(len(choice)), np.full(len(choice), np.inf)
    if config.delta is not None:
        slot = state_bytes(config, choice.tp, pool.element_bytes)
        slots = slots_in(pool, room, slot)
        states, most_running = (slots + 1) * slot, slots // pool.each
    cache = np.maximum(room - states, 0.0)
    each = kv_bytes(config, choice.tp, bytes_each)
    if most_tokens is not None:
        # A little more, so that rounding takes no token away.
        told = most_tokens * each * (1 + 1e-9)
        cache = np.minimum(cache, told) if cluster.device.offloads_to_host else told
    return ServerBytes(weights, cache, states, beside_bytes(choice, cluster), np.floor(cache / each), most_running)
