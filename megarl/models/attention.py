"""Core attention on torch, for layers without Transformer Engine: SDPA with grouped queries, causal, or over a window, with or
without sinks.

Packed sequences (thd), and context parallel with keys and values gathered, in Megatron's layout: each sequence is cut in
2 x CP chunks and rank r holds chunks r and 2 x CP - 1 - r.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megarl.models.packed import on_host

FLASH_WIDTH = 256  # elements of a head that CUDA's kernel for heads that share keys takes
WIDTH = 8  # elements of 16 bits: CUDA's kernel for masks wants a multiple of them in a head, and that without makes one


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention over queries, keys and values, dense or packed; values need not be as wide as keys.

    logit_factor: what multiplies the scale of the logits in this layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        logit_factor: float = 1.0,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self._cp = pg_collection.cp
        self._window: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            # Megatron counts the tokens before one's own.
            self._window = config.window_size[0] + 1
        self._scale = logit_factor * (softmax_scale or 1.0 / math.sqrt(config.kv_channels))
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            # Sinks of this rank's heads, by Megatron's own name. Marked as a part: the gradient's norm counts every rank's.
            self._tp = pg_collection.tp
            heads = torch.empty(config.num_attention_heads // self._tp.size(), dtype=config.params_dtype)
            self.softmax_offset = torch.nn.Parameter(heads)
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query: [s, b, heads, d], or packed [t, heads, d]; key [.., d] and value [.., v] with as many heads or fewer.

        Returns [s, b, heads * v]. s and t are this context-parallel rank's part; packed, b is 1.
        """
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if packed:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        if self._cp.size() > 1:
            both = torch.cat([key, value], dim=-1)
            both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=self._cp)
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        if packed_seq_params is not None and packed:
            return self._packed(query, key, value, packed_seq_params).flatten(2)
        return self._sequence(query, key, value).flatten(2)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description of the sinks for distributed checkpoints; empty where there are none."""
        if self.softmax_offset is None:
            return {}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"softmax_offset": self.softmax_offset},
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tp,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        return sharded

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, params: PackedSeqParams) -> Tensor:
        """Each sequence over itself alone. query: [t, 1, heads, d]; key, value: [cp * t, 1, kv heads, d], rank by rank."""
        cp, total = self._cp.size(), query.shape[0]
        params = on_host(params)
        bounds = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        lengths = (bounds.diff() // cp).tolist()
        sizes = [*lengths, total - sum(lengths)]  # the last is padding behind the sequences
        # Split, not sliced: the gradient of each slice would be a whole tensor of zeros around it.
        queries = torch.split(query, sizes)
        keys, values = (torch.split(tensor.unflatten(0, (cp, total)), sizes, dim=1) for tensor in (key, value))
        outputs = [query.new_empty(0)] * len(lengths)
        for same in _equal(lengths):  # at once: answers to one prompt are often equally long, and kernels dear to start
            q = torch.cat([queries[index] for index in same], 1)
            k, v = (torch.cat([pieces[index].flatten(0, 1) for index in same], 1) for pieces in (keys, values))
            for index, output in zip(same, self._sequence(q, k, v).split(1, 1), strict=True):
                outputs[index] = output
        behind = queries[-1].new_zeros(*queries[-1].shape[:-1], value.shape[-1])
        return torch.cat([*(output for output, length in zip(outputs, lengths, strict=True) if length), behind])

    def _sequence(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One causal sequence. query: [s, b, heads, d]; key, value: [cp * s, b, kv heads, ..], rank by rank."""
        cp, rank = self._cp.size(), self._cp.rank()
        if cp == 1:
            return self._attend(query, key, value, 0)
        length = query.shape[0] // 2
        order = torch.tensor(_chunk_order(cp), device=key.device)
        key, value = (tensor.unflatten(0, (2 * cp, length))[order].flatten(0, 1) for tensor in (key, value))
        outputs = []
        for chunk, part in zip((rank, 2 * cp - 1 - rank), query.split(length), strict=True):
            end = (chunk + 1) * length
            outputs.append(self._attend(part, key[:end], value[:end], chunk * length))
        return torch.cat(outputs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
        """Queries of positions `first` on, which end where the keys do."""
        if self._window is not None and len(key) > self._window:
            return _windowed(query, key, value, first, self._scale, self._window, self.softmax_offset)
        mask = None if first == 0 else _mask(len(query), len(key), first, None, query.device)
        return _sdpa(query, key, value, self._scale, mask, self.softmax_offset)


def _equal(lengths: list[int]) -> list[list[int]]:
    """The places of sequences that are equally long, of those that are not empty."""
    found: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        if length:
            found.setdefault(length, []).append(place)
    return list(found.values())


def _chunk_order(cp: int) -> list[int]:
    """Where each of the 2 x CP chunks lies when the ranks' parts stand one behind the other."""
    held = [chunk for rank in range(cp) for chunk in (rank, 2 * cp - 1 - rank)]
    return [held.index(chunk) for chunk in range(2 * cp)]


def _windowed(
    query: Tensor, key: Tensor, value: Tensor, first: int, scale: float, window: int, sinks: Tensor | None
) -> Tensor:
    """Blocks of `window` queries, each over the keys of its own block and of the one before: linear in the length."""
    before = min(window, first)
    queries = query.split(window)
    sizes = [before, *(len(block) for block in queries)]
    keys, values = (tensor[first - before :].split(sizes) for tensor in (key, value))
    outputs = []
    for index, block in enumerate(queries):
        near = [torch.cat(pieces[index : index + 2]) for pieces in (keys, values)]
        mask = _mask(len(block), len(near[0]), len(keys[index]), window, query.device)
        outputs.append(_sdpa(block, near[0], near[1], scale, mask, sinks))
    return torch.cat(outputs)


def _mask(num_queries: int, num_keys: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] bool: query i stands at key first + i, and sees it and those before, at most `window` of them."""
    distance = torch.arange(first, first + num_queries, device=device)[:, None] - torch.arange(num_keys, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, sinks: Tensor | None = None
) -> Tensor:
    """[s, b, heads, d] -> [s, b, heads, v]; causal where no mask is given. sinks: [heads], see `_with_sink`."""
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    if sinks is not None:
        q, k, v = _with_sink(q, k, v, sinks, scale)
        if mask is None:  # one more query, which sees the sink alone: so that each sees as many keys as its place says
            q = F.pad(q, (0, 0, 1, 0))
        else:
            mask = F.pad(mask, (1, 0), value=True)
    # The kernels that never hold [s, s] want values as wide as keys; zeros beside queries and keys change no product.
    width = -(-max(q.shape[-1], v.shape[-1]) // WIDTH) * WIDTH
    q, k, v = (t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
    if mask is not None or width > FLASH_WIDTH:
        return _apart(q, k, v, mask, scale)[-len(query) :, ..., : value.shape[-1]]
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return output[:, :, -len(query) :, : value.shape[-1]].permute(2, 0, 1, 3)


def _apart(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[b, heads, s, d] -> [s, b, heads, d]. mask: [queries, keys] bool; None is causal.

    Of CUDA's kernels that never hold [s, s] one takes masks and heads of any width, and no heads that share keys (torch 2.13,
    mem_eff_attention/kernel_forward.h): here those that do are as many batches, over the same memory of keys.
    """
    (batch, heads, length, width), shared = q.shape, k.shape[1]
    groups = heads // shared
    q = q.unflatten(1, (shared, groups)).permute(2, 0, 1, 3, 4).flatten(1, 2)
    k, v = (tensor.flatten(0, 1).expand(groups, -1, -1, -1) for tensor in (k, v))
    output = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale)
    return output.view(groups, batch, shared, length, width).permute(3, 1, 2, 0, 4).flatten(2, 3)


def _with_sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """One more key before the others: scaled, its product with a head's queries is the head's sink; its value is zero.

    So any kernel's softmax has exp(sink) in its denominator (Megatron's softmax_type "learnable"). q, k: [b, heads, s, d] become
    two elements wider; v: [b, heads, s, v]. sinks: [heads]. In a narrow type the two elements of a query add up to what one
    would round.
    """
    exact = sinks.double() / scale
    high = exact.to(q.dtype)
    pair = torch.stack([high, (exact - high).detach().to(q.dtype)], -1)
    q = torch.cat([q, pair[None, :, None].expand(*q.shape[:3], 2)], -1)
    sink = torch.cat([k.new_zeros(k.shape[-1]), k.new_ones(2)]).expand(*k.shape[:2], 1, -1)
    return q, torch.cat([sink, F.pad(k, (0, 2))], 2), F.pad(v, (0, 0, 1, 0))
