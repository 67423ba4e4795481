"""GRPO by turns: each turn of an episode is compared with the same turn of its group's other episodes. numpy."""

from __future__ import annotations

import numpy as np

from megarl.algorithms.advantage import group_advantages
from megarl.algorithms.ragged import Bounds, Floats, Mask, check_finite, check_ragged, reverse_scan
from megarl.core.types import FloatArray, IntArray


def turn_group_advantages(
    token_rewards: Floats,
    mask: Mask,
    cu_seqlens: Bounds,
    sequence_groups: IntArray,
    first_turns: IntArray | None = None,
    *,
    normalize_std: bool = True,
) -> FloatArray:
    """A of a turn = group_advantages of its R, over the turns of the same number in the group; R = rewards from that turn on.

    A turn is what is trained on without a break; turns are numbered in each sequence, from its first_turns. An episode that has
    ended is in no later turn's baseline: the policy is compared with those that came as far. A turn without others gives 0.

    token_rewards: [T]. sequence_groups: [S], the group of each sequence, from 0. first_turns: [S], how many turns of each lie
    before those of the mask, such as are too old to be trained on; default: none. Returns [T] float32: a turn's advantage at each
    of its tokens, 0 outside of the mask. Raises ValueError for other shapes, and for infinities inside of the mask.
    """
    check_ragged(mask, cu_seqlens, token_rewards=token_rewards)
    check_finite(mask, token_rewards=token_rewards)
    if len(sequence_groups) != len(cu_seqlens) - 1:
        raise ValueError(f"one group a sequence is needed: {len(cu_seqlens) - 1}; got {len(sequence_groups)}")
    chosen = np.asarray(mask) != 0
    begins = chosen.copy()
    begins[1:] &= ~chosen[:-1]
    heads = np.asarray(cu_seqlens[:-1], np.int64)[np.diff(cu_seqlens) > 0]
    begins[heads] = chosen[heads]
    turn = np.cumsum(begins)[chosen] - 1  # of each trained token
    sequence = np.searchsorted(cu_seqlens, np.flatnonzero(begins), side="right") - 1  # of each turn
    number = np.arange(len(sequence)) - np.searchsorted(sequence, sequence)
    if first_turns is not None:
        number += np.asarray(first_turns, np.int64)[sequence]
    earned = np.zeros(len(sequence), np.float64)
    np.add.at(earned, turn, token_rewards[chosen])
    goes_on = np.append(sequence[1:] == sequence[:-1], False)[: len(sequence)].astype(np.float64)
    same = np.asarray(sequence_groups, np.int64)[sequence] * (number.max(initial=0) + 1) + number
    _, beside = np.unique(same, return_inverse=True)
    advantages = group_advantages(reverse_scan(earned, goes_on), beside, normalize_std)
    result = np.zeros(len(chosen), np.float32)
    result[chosen] = advantages[turn]
    return result
