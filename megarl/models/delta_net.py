"""Gated DeltaNet (arXiv 2412.06464): attention's place taken by a state that each token decays and corrects. For every platform.

Megatron's own needs kernels of Triton and takes no packed sequences. All of a sequence's tokens go through its state in order,
in chunks: within one, tokens meet as in attention, and the state goes from chunk to chunk. Sequences know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor
from torch.nn import Parameter

from megarl.models.config import Delta

CHUNK = 64  # tokens: a chunk's products are of this size, and there is one step of the state for each chunk
NORM_EPS = 1e-6  # of queries' and keys' length


class GatedDeltaNet(MegatronModule):  # type: ignore[misc]
    """A layer's mixing of tokens by the gated delta rule; tensor-parallel ranks have some of the key heads each.

    The first linear's columns are, for each key head: its query, its key, the values and gates of its value heads, and one
    number a value head for how much is written, and for how much decays (rule_table.py).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        delta: Delta,
        attn_mask_type: Any = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert pg_collection is not None and pg_collection.cp.size() == 1, "layout_check refuses it"
        self._delta, self._tp = delta, pg_collection.tp
        self._recompute = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        ranks, dtype, heads = self._tp.size(), config.params_dtype, delta.num_value_heads
        common = {"config": config, "bias": False, "tp_group": self._tp}
        self.linear_in = tensor_parallel.ColumnParallelLinear(
            config.hidden_size,
            delta.num_key_heads * delta.columns,
            init_method=config.init_method,
            gather_output=False,
            **common,
        )
        self.linear_proj = tensor_parallel.RowParallelLinear(
            heads * delta.value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **common,
        )
        mixed = delta.num_key_heads * delta.mixed // ranks
        self.conv_weight = Parameter(torch.empty(mixed, 1, delta.conv_width, dtype=dtype))
        self.decay_log = Parameter(torch.empty(heads // ranks, dtype=dtype))
        self.decay_bias = Parameter(torch.empty(heads // ranks, dtype=dtype))
        for part in (self.conv_weight, self.decay_log, self.decay_bias):
            set_tensor_model_parallel_attributes(part, True, 0, 1)
        self.norm_weight = Parameter(torch.empty(delta.value_dim, dtype=dtype))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """[s, b, hidden] -> [s, b, hidden], and no bias; under sequence parallel this rank's part of the tokens."""
        columns, delta = self.linear_in(hidden_states)[0], self._delta
        length, batch = columns.shape[:2]
        if packed_seq_params is None:
            lengths = [length] * batch
        else:
            bounds = packed_seq_params.cu_seqlens_q
            lengths = bounds.diff().tolist()
        flat = columns.transpose(0, 1).flatten(0, 1).unflatten(-1, (-1, delta.columns))
        each = delta.num_value_heads // delta.num_key_heads
        mixed, gate, write, decay = flat.split([delta.mixed, each * delta.value_dim, each, each], dim=-1)

        def remember(mixed: Tensor, write: Tensor, decay: Tensor) -> Tensor:
            return self._remember(mixed, write, decay, lengths)

        if self._recompute and self.training:
            output = tensor_parallel.checkpoint(remember, False, mixed, write, decay)
        else:
            output = remember(mixed, write, decay)
        output = self._gated(output, gate.unflatten(-1, (each, delta.value_dim)))
        return self.linear_proj(output.flatten(1).unflatten(0, (batch, length)).transpose(0, 1).contiguous())[0], None

    def _remember(self, mixed: Tensor, write: Tensor, decay: Tensor, lengths: Sequence[int]) -> Tensor:
        """What each token reads from the state: [t, key heads, value heads of each, value_dim], in the model's dtype.

        mixed: [t, key heads, queries, keys and values]. write, decay: [t, key heads, value heads of each].
        """
        delta, heads = self._delta, write.shape[1:]
        mixed = F.silu(causal_conv(mixed.flatten(1), self.conv_weight, lengths)).unflatten(-1, (heads[0], -1))
        query, key, value = mixed.float().split([delta.key_dim, delta.key_dim, delta.mixed - 2 * delta.key_dim], dim=-1)
        query, key = (x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for x in (query, key))
        log_decay = -self.decay_log.float().exp() * F.softplus(decay.float().flatten(1) + self.decay_bias.float())
        found = gated_delta_rule(
            query * delta.key_dim**-0.5,
            key,
            value.unflatten(-1, (heads[1], delta.value_dim)),
            log_decay.unflatten(-1, heads),
            write.float().sigmoid(),
            lengths,
        )
        return found.type_as(mixed)

    def _gated(self, output: Tensor, gate: Tensor) -> Tensor:
        """RMSNorm of each head's output, times the gate's SiLU; of the same shape."""
        # All ranks' heads have this weight: its gradient is the sum over the ranks.
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self._tp)
        normed = F.rms_norm(output.float(), output.shape[-1:], weight.float(), self.config.layernorm_epsilon)
        return (normed * F.silu(gate.float())).type_as(output)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description for distributed checkpoints, which load at another layout."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            dict(self.named_parameters(recurse=False)),
            prefix,
            {"conv_weight": 0, "decay_log": 0, "decay_bias": 0},
            sharded_offsets,
            tp_group=self._tp,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self._tp
            )
        return state


def causal_conv(tokens: Tensor, weight: Tensor, lengths: Sequence[int]) -> Tensor:
    """Each channel's sum of a token and those before it in its sequence, weighted; before a sequence's beginning are zeros.

    tokens: [t, channels], sequences end to end; zeros come out behind them. weight: [channels, 1, width], the token's own last.
    """
    before = weight.shape[-1] - 1
    pieces = tokens.split([*lengths, len(tokens) - sum(lengths)])[:-1]
    gap = tokens.new_zeros(before, tokens.shape[1])
    apart = torch.cat([part for piece in pieces for part in (gap, piece)])
    found = F.conv1d(apart.T[None], weight, groups=tokens.shape[1])[0].T
    sizes = [size for length in lengths for size in (length, before)]
    kept = found.split(sizes[:-1])[::2]
    return torch.cat([*kept, tokens.new_zeros(len(tokens) - sum(lengths), tokens.shape[1])])


@dataclass(frozen=True)
class Chunks:
    """Sequences cut in chunks. rows: chunks of all; the first ones of all sequences come first, longest sequence first, then the
    second ones, and so on: `steps` says how many. places: of each token, among the rows' tokens."""

    rows: int
    steps: list[int]
    places: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Chunks:
        """Of sequences of these lengths, end to end."""
        counts = [-(-length // CHUNK) for length in lengths]
        order = sorted(range(len(lengths)), key=lambda index: -counts[index])
        rank = {index: place for place, index in enumerate(order)}
        steps = [sum(count > step for count in counts) for step in range(max(counts, default=0))]
        firsts = [sum(steps[:step]) for step in range(len(steps))]
        starts = [firsts[step] + rank[index] for index, count in enumerate(counts) for step in range(count)]
        sizes = [min(CHUNK, length - start) for length in lengths for start in range(0, length, CHUNK)]
        begins = torch.tensor(starts, device=device).mul(CHUNK)
        sized, total = torch.tensor(sizes, device=device), sum(sizes)  # told, no device is asked how many there are
        within = torch.arange(total, device=device) - (sized.cumsum(0) - sized).repeat_interleave(
            sized, output_size=total
        )
        return cls(len(starts), steps, begins.repeat_interleave(sized, output_size=total) + within)

    def cut(self, tokens: Tensor) -> Tensor:
        """[t, ...] -> [rows, CHUNK, ...], zeros behind a sequence's end."""
        padded = tokens.new_zeros(self.rows * CHUNK, *tokens.shape[1:])
        placed = padded.index_copy(0, self.places, tokens[: len(self.places)])
        return placed.view(self.rows, CHUNK, *tokens.shape[1:])

    def joined(self, chunks: Tensor, total: int) -> Tensor:
        """[rows, CHUNK, ...] -> [total, ...], zeros behind the sequences."""
        found = chunks.flatten(0, 1).index_select(0, self.places)
        return torch.cat([found, found.new_zeros(total - len(found), *found.shape[1:])])


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, write: Tensor, lengths: Sequence[int]
) -> Tensor:
    """What queries read from a state S [key_dim, value_dim], zero before a sequence: S <- a S + b k (v - a S' k)', o = S' q.

    query, key: [t, heads, key_dim]; value: [t, heads, each, value_dim]; log_decay (ln a), write (b): [t, heads, each]; float32,
    of sequences end to end. Returns [t, heads, each, value_dim]. In the chunked form of arXiv 2412.06464, section 3.3: with a's
    products since the chunk's beginning, what a chunk's tokens write is the solution of a triangular system.
    """
    chunks = Chunks.of(lengths, query.device)
    # Contiguous, so that products need no copies. [rows, heads, 1, CHUNK, key_dim]
    q, k = (chunks.cut(x).transpose(1, 2).unsqueeze(2).contiguous() for x in (query, key))
    v = chunks.cut(value).permute(0, 2, 3, 1, 4)  # [rows, heads, each, CHUNK, value_dim]
    b, total = (chunks.cut(x).permute(0, 2, 3, 1) for x in (write, log_decay))
    total = total.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    # Masked before the exponential: of a later token it could be infinite, and zero times that is nothing.
    decays = (total[..., None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    since = total.exp()[..., None]
    told = torch.cat([v * b[..., None], k * (since * b[..., None])], dim=-1)
    # Unit-triangular: the diagonal and what is above it are not read.
    solved = torch.linalg.solve_triangular(
        k @ k.transpose(-1, -2) * decays * b[..., None], told, upper=False, unitriangular=True
    )
    written, forgotten = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    near = q @ k.transpose(-1, -2) * decays
    kept = k * (total[..., -1:] - total).exp()[..., None]
    parts = [x.split(chunks.steps) for x in (written, forgotten, near, q * since, kept, since[..., -1:, :])]
    state, outputs = None, list[Tensor]()
    for new, lost, inside, asked, held, decay in zip(*parts, strict=True):
        if state is None:
            outputs.append(inside @ new)
            state = held.transpose(-1, -2) @ new
            continue
        state = state[: len(new)]  # of sequences that go on
        left = new - lost @ state
        outputs.append(asked @ state + inside @ left)
        state = state * decay + held.transpose(-1, -2) @ left
    return chunks.joined(torch.cat(outputs).permute(0, 3, 1, 2, 4), len(query))
