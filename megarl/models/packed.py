"""Packed sequences as Megatron describes them, with their bounds on the host as well: who cuts by those waits for no device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.models.seen import Seen


@dataclass
class PackedBounds(PackedSeqParams):  # type: ignore[misc]
    """host_bounds: [S + 1] int32, the bounds in the host's memory; None where only the device has them. seen: images.

    device_bounds: those of the device, where all others are the host's.
    """

    host_bounds: Tensor | None = None
    device_bounds: Tensor | None = None
    seen: Seen | None = None


def packed_params(
    cu_seqlens: Tensor, cp: int = 1, host_bounds: Tensor | None = None, seen: Seen | None = None
) -> PackedBounds:
    """Sequences packed end to end.

    cu_seqlens: [S + 1] int32, from 0 to T. cp: ranks of each. host_bounds: the same on the host, for who has them: to look at a
    device's is to wait for it.
    """
    longest = int((cu_seqlens if host_bounds is None else host_bounds).diff().max())
    # Transformer Engine cuts the padded bounds over context-parallel ranks. In each layer it holds them to the others: torch
    # finds that they are one tensor without a look at the device.
    padded = cu_seqlens if cp > 1 else None
    return PackedBounds(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        host_bounds=host_bounds,
        seen=seen,
    )


def on_host(params: PackedSeqParams) -> PackedSeqParams:
    """The same with all bounds in the host's memory, where they are known there."""
    bounds = getattr(params, "host_bounds", None)
    if bounds is None:
        return params
    return _with_bounds(replace(params, device_bounds=params.cu_seqlens_q), bounds)


def on_device(params: PackedSeqParams) -> PackedSeqParams:
    """`on_host` undone."""
    bounds = getattr(params, "device_bounds", None)
    return params if bounds is None else _with_bounds(params, bounds)


def _with_bounds(params: PackedSeqParams, bounds: Tensor) -> PackedSeqParams:
    padded = None if params.cu_seqlens_q_padded is None else bounds
    return replace(
        params,
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
    )


def give_host_bounds(
    module: Any, given: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before an attention of torch's: Megatron's rotation asks four times for how long sequences are, and the core once."""
    params = options.get("packed_seq_params")
    return given, options if params is None else options | {"packed_seq_params": on_host(params)}


def give_device_bounds(
    module: Any, given: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a core attention of Transformer Engine's, whose kernels read the device's: its layer was given the host's."""
    params = options.get("packed_seq_params")
    return given, options if params is None else options | {"packed_seq_params": on_device(params)}
