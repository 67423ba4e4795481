"""States of linear attention in a server: how many SGLang keeps, of how many bytes, and how many sequences they let run at once.

What linear attention keeps of a sequence is as large at any length. SGLang 0.5.21 (mem_cache/kv_cache_configurator.py) holds
it in slots, of which a running sequence has several: what it held before stays for others that begin alike. Without a flag
slots take `over_cache` times the bytes of keys and values, and no token can have these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.core.errors import UserError
from megarl.core.words import last_value
from megarl.models.config import ModelConfig

# The last tokens before the convolution are in bfloat16, whatever the run's dtype (SGLANG_MAMBA_CONV_DTYPE).
CONV_BYTES = 2
DTYPE, SLOTS, RATIO = "--mamba-ssm-dtype", "--max-mamba-cache-size", "--mamba-full-memory-ratio"
STRATEGY, OVERLAP, RADIX = "--mamba-radix-cache-strategy", "--disable-overlap-schedule", "--disable-radix-cache"
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Slots of a running sequence, by the strategy and whether the host runs ahead; one where no prefix is kept.
EACH = {
    ("extra_buffer", True): 5,
    ("extra_buffer", False): 4,
    ("extra_buffer_lazy", True): 4,
    ("no_buffer", True): 3,
    ("no_buffer", False): 3,
}


@dataclass(frozen=True)
class StatePool:
    """How a server keeps states. element_bytes: of a state's elements; None: the model's own. slots: their number; None: as many
    as `over_cache` leaves bytes for. each: slots of a running sequence.
    """

    element_bytes: int | None = None
    slots: int | None = None
    over_cache: float = 0.9
    each: int = 5


def state_pool(args: Sequence[str], max_running: int) -> StatePool:
    """What flags of a server say of its states. Raises UserError for values that SGLang would not take."""
    said = {name: last_value(args, name) for name in (DTYPE, SLOTS, RATIO, STRATEGY)}
    told = {name: value for name, value in said.items() if value is not None}
    try:
        element_bytes = DTYPES[told[DTYPE]] if DTYPE in told else None
        slots = int(told[SLOTS]) if SLOTS in told else None
        ratio = float(told.get(RATIO, StatePool.over_cache))
        ahead = OVERLAP not in args
        strategy = told.get(STRATEGY, "auto")
        if strategy == "auto":
            strategy = "extra_buffer" if ahead else "no_buffer"
        each = EACH[strategy, ahead]
    except (KeyError, ValueError):
        words = ", ".join(f"{name} {value}" for name, value in told.items())
        raise UserError(
            f"rollout.server_args says {words}: {DTYPE} takes one of {', '.join(DTYPES)}, {SLOTS} a whole number, {RATIO} a "
            f"number, and {STRATEGY} one of auto, {', '.join(dict.fromkeys(name for name, _ in EACH))}."
        ) from None
    if RADIX in args:
        return StatePool(element_bytes, max_running if slots is None else slots, ratio, each=1)
    return StatePool(element_bytes, slots, ratio, each)


def state_bytes(config: ModelConfig, tp: Any, element_bytes: int | None = None) -> Any:
    """[N] bytes of one sequence's states on one rank of a server: of all layers with linear attention.

    Of each the state of its value heads, and the tokens that the convolution still sees.
    """
    delta = config.delta
    if delta is None:
        return np.zeros(np.shape(tp))
    state = delta.num_value_heads * delta.key_dim * delta.value_dim * (element_bytes or delta.state_bytes)
    convolved = delta.num_key_heads * delta.mixed * (delta.conv_width - 1) * CONV_BYTES
    return len(config.linear_layers) * (state + convolved) / np.asarray(tp)


def slots_in(pool: StatePool, room: Any, slot_bytes: Any) -> Any:
    """[N] slots of a server. room: bytes that weights leave it for states, keys and values. One slot more is nobody's."""
    if pool.slots is not None:
        return np.full(np.shape(room), pool.slots)
    share = pool.over_cache / (1 + pool.over_cache)
    return np.maximum(np.floor((room * share - slot_bytes) / slot_bytes), 0)
