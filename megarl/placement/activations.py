"""What one layer holds of a micro-batch on one rank: for its backward pass, at that pass's fullest moment, and without gradients.

Counted from the modules that the engine builds (models/layer_spec.py, megatron-core): the tensors that autograd saves, each
once. A norm keeps its input and output. Two sets of kernels differ. Fused ones (Transformer Engine) keep the gate's input, and
queries, keys, values, output and log-sums of the attention core. Plain torch keeps the steps between as well: both halves of
the gate, cosines and sines, and copies of queries, keys and values padded to one width (models/attention.py).
bench/memory_predicted.py holds the sums against the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megarl.models.config import Delta, Mla, ModelConfig, Moe
from megarl.placement.devices import Kernels
from megarl.placement.sizes import linear_share
from megarl.placement.space import FULL, RECOMPUTE, Layouts
from megarl.recipe.roles import Lora

FLOAT, INDEX = 4, 8
CHUNK = 64  # tokens of a step of linear attention (models/delta_net.py)
SINK = 2  # elements beside each query and key that make the product with the sink (models/attention.py)
WIDTH = 8  # and what a head's are filled up to a multiple of
SELECTIVE = RECOMPUTE.index("selective")


@dataclass(frozen=True)
class Layer:
    """[N] bytes. kept: until the backward pass. extra: beside it at that pass's fullest moment. forward: at most at a time
    without gradients."""

    kept: Any
    extra: Any
    forward: Any


@dataclass(frozen=True)
class Heads:
    """[N] a rank's heads of queries, and of keys and values, with the widths of a key and of a value."""

    queries: Any
    pairs: Any
    key: int
    value: int


@dataclass(frozen=True)
class Counting:
    """What a layer's bytes depend on. each: bytes of one activation. sequence: tokens of a micro-batch's longest sequence.

    lora: adapters that alone are trained. padded: tokens of a micro-batch with padding, for each without.
    """

    config: ModelConfig
    choice: Layouts
    each: int
    kernels: Kernels
    sequence: Any
    lora: Lora | None = None
    padded: Any = 1.0

    @property
    def fused(self) -> bool:
        """Whether the layers are Transformer Engine's (models/layer_spec.py), but for windows under context parallel."""
        config = self.config
        wide = config.mla is not None and config.mla.v_dim > config.head_dim
        norms = config.post_norms or config.whole_qk_norm or config.late_qk_norm
        apart = config.mixed_ropes or config.output_bias or config.delta or config.output_gate or config.halves == 1
        cannot = norms or apart or wide or self.each == FLOAT
        return self.kernels.fused and not cannot

    @property
    def tokens(self) -> Any:
        """[N] tokens of a micro-batch on one rank, with its sequences' padding."""
        return self.padded * self.choice.micro_tokens / self.choice.cp

    @property
    def between(self) -> Any:
        """[N] ranks that share the tokens between tensor-parallel regions."""
        return np.where(self.choice.sequence_parallel > 0, self.choice.tp, 1)

    @property
    def hidden(self) -> Any:
        """[N] bytes of the hidden states between tensor-parallel regions."""
        return self.tokens * self.config.hidden_size * self.each / self.between

    def reads(self, *linears: str) -> bool:
        """Whether a linear's input is kept: for the gradient of its weight, or of its adapter."""
        return self.lora is None or any(name in self.lora.targets for name in linears)

    def norm(self, width: float, *, output: bool, of: Any = None) -> Any:
        """[N] bytes kept by a norm over so many numbers. output: whether what follows keeps it. of: ranks that share it."""
        kept = FLOAT if self.config.norm_offset else self.each  # Gemma's are of float32
        return self.tokens * (width * (kept + output * self.each) + FLOAT) / (self.between if of is None else of)

    def _before(self, linear: str) -> Any:
        """[N] bytes kept before a linear: by a norm, or by the linear alone where there is none."""
        if not self.config.pre_norms:
            return self.hidden * self.reads(linear)
        return self.norm(self.config.hidden_size, output=self.reads(linear))

    @cached_property
    def dense(self) -> Layer:
        """A layer with an MLP without experts."""
        config, width = self.config, self.config.ffn_hidden_size / self.choice.tp * self.tokens * self.each
        kept = self._before("linear_fc1") + (self._gated(width) if config.halves == 2 else self._learned(width))
        if config.post_norms:
            kept = kept + self.norm(config.hidden_size, output=False)
        # Where the gate is differentiated, both halves' gradients; or where fc2 is, its weight's and the whole output's.
        weight = (
            0 if self.lora is not None else config.hidden_size * config.ffn_hidden_size / self.choice.tp * self.each
        )
        extra = np.maximum((3 - self.reads("linear_fc2")) * width, width + weight + self._gathered)
        return self._layer(kept, extra, (3 if self.fused else 5) * width)

    @cached_property
    def experts(self) -> Layer:
        """A layer with experts, their tokens dealt evenly."""
        moe = self.config.moe
        assert moe is not None
        # The ranks that share an expert's columns each have the rows of all of them.
        clamped = self.config.activation == "swiglu_clamped"  # the gate's input once more, and its sigmoid
        rows = moe.top_k * self.hidden * self.choice.etp
        reads_rows, reads_inner = self.reads("experts.linear_fc1"), self.reads("experts.linear_fc2")
        width = rows * moe.ffn_hidden_size / self.config.hidden_size / self.choice.etp
        shared = moe.shared_ffn_hidden_size / self.choice.tp * self.tokens * self.each
        steps = (2 if self.fused else 5 + 2 * clamped) + reads_inner
        kept = self.norm(self.config.hidden_size, output=True) + reads_rows * rows + steps * width
        kept = kept + rows / self.config.hidden_size * (
            self._rank("experts.linear_fc1") + self._rank("experts.linear_fc2")
        )
        kept = kept + self._router(moe) + self._gated(shared)
        if moe.normed:  # norms behind MLP, experts and both; and the router's own, with what multiplies it
            kept = kept + 3 * self.norm(self.config.hidden_size, output=False) + 2 * self.hidden
        if moe.shared_gate:  # what is gated, and the gate
            kept = kept + self.hidden + self.tokens * self.each / self.between
        # Permuted tokens as sent, and what the experts put out; without grouped products once more, to put it together.
        sent = rows * (2 if self.fused else 3) + self.hidden * (shared > 0)
        extra = np.maximum(sent, 2 * width + rows) if self.fused else sent
        inside = 3 * width if self.fused else 5 * width * self.choice.ep / moe.num_experts
        return self._layer(kept, extra, sent + rows + inside)

    def _layer(self, kept: Any, extra: Any, forward: Any) -> Layer:
        """kept, extra, forward: of the MLP."""
        attention, gradients, passing = self._attention
        extra = np.maximum(extra, gradients - kept) + self.hidden
        return Layer(attention + kept, extra, 4 * self.hidden + np.maximum(passing, forward))

    def _gated(self, width: Any) -> Any:
        """Kept by a gated MLP of so many bytes: the gate's input; its parts; the second linear's input."""
        adapters = self._inner("linear_fc1") + self._inner("linear_fc2")
        return width * ((2 if self.fused else 4) + self.reads("linear_fc2")) + adapters * (width > 0)

    def _learned(self, width: Any) -> Any:
        """Kept by an MLP with xIELU of so many bytes: what goes into it, three steps between, a map of bytes, what comes out."""
        adapters = self._inner("linear_fc1") + self._inner("linear_fc2")
        return width * (4 + 1 / self.each + self.reads("linear_fc2")) + adapters

    def _inner(self, linear: str) -> Any:
        """Kept between an adapter's two factors."""
        return self.tokens * self._rank(linear) * self.each

    def _rank(self, linear: str) -> int:
        """Of a linear's adapter; 0 where it has none."""
        return self.lora.rank if self.lora is not None and linear in self.lora.targets else 0

    @property
    def _gathered(self) -> Any:
        """The whole tokens' hidden states, where sequence parallel has cut them."""
        return self.tokens * self.config.hidden_size * self.each * (self.between > 1)

    def _router(self, moe: Moe) -> Any:
        """Scores, probabilities and a map by expert; chosen probabilities, experts and sorted rows.

        Torch's operations have two maps of bytes; Transformer Engine's one of two integers.
        """
        scored = moe.score == "sigmoid" or not moe.normalize
        by_expert = (2 + scored) * FLOAT + (2 * FLOAT if self.fused else 2)
        return self.tokens * (moe.num_experts * by_expert + moe.top_k * (2 * FLOAT + 2 * INDEX)) / self.between

    @cached_property
    def _attention(self) -> tuple[Any, Any, Any]:
        """Of attention with its norm: bytes kept, gradients at once where the core is differentiated, forward at most."""
        config = self.config
        if config.mla is not None:
            return self._latent(config.mla)
        if config.delta is None:
            kinds = [(share, *self._grouped(kind)) for share, kind in config.kinds_of_heads]
            fullest = [np.max(np.broadcast_arrays(*(each[place] for each in kinds)), axis=0) for place in (1, 2, 3)]
            # Layers that are computed again are held one at a time: the fullest counts.
            kept = np.where(self.choice.recompute == FULL, fullest[0], sum(share * each for share, each, *_ in kinds))
            return kept, fullest[1], fullest[2]
        linear, share = self._linear(config.delta), linear_share(config)
        if share == 1:
            return linear
        full = self._grouped(config)
        # Layers that are computed again are held one at a time: the fullest counts.
        kept = np.where(
            self.choice.recompute == FULL, np.maximum(linear[0], full[0]), share * linear[0] + (1 - share) * full[0]
        )
        return kept, np.maximum(linear[1], full[1]), np.maximum(linear[2], full[2])

    def _linear(self, delta: Delta) -> tuple[Any, Any, Any]:
        """Gated DeltaNet (models/delta_net.py), float32 behind the convolution; sequences' last chunks are taken as full."""
        tp, tokens, each = self.choice.tp, self.tokens, self.each
        pairs, heads = delta.num_key_heads / tp, delta.num_value_heads / tp
        mixed, keys, values = pairs * delta.mixed, heads * delta.key_dim, heads * delta.value_dim
        wide = each == FLOAT
        columns = pairs * delta.columns * each
        # The convolution's input and output, and what follows in float32; queries and keys by themselves.
        kept = 2 * mixed * each + mixed * FLOAT + 2 * pairs * delta.key_dim * FLOAT
        # Of the triangular system its products, its solution and what it was made of; of the steps what they multiply.
        square = pairs * 2 + heads * 4
        kept = kept + FLOAT * (square * CHUNK + 4 * values + 4 * keys + keys * delta.value_dim / CHUNK)
        selective, inside = self.choice.recompute == SELECTIVE, kept
        passing = columns + mixed * (each + FLOAT * (not wide))
        passing = passing + FLOAT * (2 * pairs * delta.key_dim + 2 * heads * CHUNK + 4 * values + 4 * keys)
        norm = FLOAT * (values * 3 + heads)
        kept = np.where(selective, columns + values * each, kept + columns * wide)
        kept = kept + norm + values * (FLOAT * (not wide) + each * self.reads("linear_proj"))
        before = self._before("linear_in") + self._inner("linear_in") + self._inner("linear_proj")
        gradients = columns + np.where(selective, inside, FLOAT * (3 * values + 3 * keys))
        return before + tokens * kept, tokens * gradients, tokens * passing

    def _grouped(self, config: ModelConfig) -> tuple[Any, Any, Any]:
        tp = self.choice.tp
        heads = Heads(config.num_heads / tp, config.num_kv_heads / tp, config.head_dim, config.head_dim)
        query, key = heads.queries * heads.key, heads.pairs * heads.key
        mixed = query * (2 if config.output_gate else 1) + (1 if config.keys_as_values else 2) * key
        kept = self._before("linear_qkv") + self._rotation(config.rotated)
        if config.whole_qk_norm:  # two norms, of copies
            kept = kept + self.norm(query + key, output=False, of=1) + self.tokens * FLOAT
        elif config.late_qk_norm:  # two norms, of what is rotated
            per_head = self.tokens * FLOAT * (heads.queries + heads.pairs - 1)
            kept = kept + self.norm(query + key, output=False, of=1) + per_head
        elif config.qk_norm:
            kept = (
                kept
                + self.norm(query + key, output=False, of=1)
                + self.tokens * FLOAT * (heads.queries + heads.pairs - 1)
            )
            # In float32 the norm's input is a view, which keeps the linear's whole output.
            view = not self.fused and self.each == FLOAT
            kept = kept + self.tokens * self.each * view * (mixed - key)
            mixed = mixed * (not view)
        if config.value_norm:  # of a view, where keys' is as well
            kept = kept + self.norm(key, output=False, of=1) + self.tokens * FLOAT * (heads.pairs - 1)
        if config.post_norms:
            kept = kept + self.norm(config.hidden_size, output=False)
        kept = kept + self._inner("linear_qkv") + self._inner("linear_proj")
        return self._core(heads, kept, mixed)

    def _latent(self, mla: Mla) -> tuple[Any, Any, Any]:
        """Latent attention: projections go through two narrow latents, each with a norm; heads are not grouped."""
        own = self.config.num_heads / self.choice.tp
        heads = Heads(own, own, mla.nope_dim + mla.rope_dim, mla.v_dim)
        names = ("linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj")
        kept = self.norm(self.config.hidden_size, output=self.reads(*names)) + self._rotation(self.config.rotated)
        if mla.q_rank is not None:
            kept = kept + self.norm(mla.q_rank, output=self.reads("linear_q_up_proj"))
        kept = (
            kept
            + self.norm(mla.kv_rank, output=self.reads("linear_kv_up_proj"))
            + self.tokens * mla.rope_dim * self.each
        )
        for name in (*names, "linear_q_up_proj", "linear_kv_up_proj", "linear_proj"):
            kept = kept + self._inner(name)
        return self._core(heads, kept, own * (mla.nope_dim + mla.v_dim))

    def _rotation(self, width: int) -> Any:
        """Cosines and sines, for queries and for keys."""
        return 0 if self.fused else 4 * self.tokens * width * self.each

    def _core(self, heads: Heads, kept: Any, views: Any) -> tuple[Any, Any, Any]:
        """kept: by what is around the core. views: elements of a token that a view of the values keeps."""
        output = heads.queries * heads.value
        query, key = heads.queries * heads.key, heads.pairs * heads.key
        read, sums = output * self.reads("linear_proj"), FLOAT * heads.queries
        # A recomputed core keeps its arguments.
        again = (query + key + views + read) * self.each
        if self.fused:
            inside = query + key + heads.pairs * heads.value
            none = (inside + output) * self.each + sums
            masks = 0
        else:
            # Padded copies; keys and values once for every block or chunk of queries that reads them.
            wide = -(-max(heads.key + SINK * self.config.sinks, heads.value) // WIDTH) * WIDTH
            times, masks = self._blocks
            inside = wide * (heads.queries + 2 * heads.pairs * times)
            none = (inside + heads.queries * wide + read) * self.each + sums + masks
        core = np.where(self.choice.recompute == SELECTIVE, again, none)
        # The output is made anew, when the linear behind the core has let go of the one that it kept.
        recomputed = np.where(self.choice.recompute == SELECTIVE, none - read * self.each, 0)
        gradients = (inside + 2 * output) * self.each + recomputed
        passing = (query + key + views + inside + 2 * output) * self.each + masks
        return kept + self.tokens * core, self.tokens * gradients, self.tokens * passing

    @property
    def _blocks(self) -> tuple[Any, Any]:
        """How often torch's core copies a key, and bytes a token of its masks: [queries, keys] of each block and sequence.

        Context parallel: rank r attends with chunks r and 2 cp - 1 - r of 2 cp, to r + 1 and 2 cp - r chunks of keys. Windows:
        each block of queries to its own keys and those of the block before.
        """
        config, cp = self.config, self.choice.cp
        chunk = self.sequence / (2 * cp)
        times, masks = np.where(cp > 1, cp + 0.5, 1), np.where(cp > 1, self.each * (2 * cp + 1) * chunk / 2, 0)
        if config.window is None:
            return times, masks
        local = len(config.local_layers) / config.num_layers
        again = 2 - np.minimum(config.window / self.sequence, 1)
        cut = (self.sequence > config.window) & (cp == 1)
        times = times + np.where(cut, local * (again - 1), 0)
        return times, masks + np.where(cut, local * config.window * again * self.each, 0)
