"""What each turn of an episode was worth, at the label that it ended with: for advantages that look at single turns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.core.types import Block, FloatArray, IntArray, Sample
from megarl.recipe.schema import Recipe
from megarl.rollout.sequences import Sequences

# In a sample's metadata: what its turns were worth, and the positions of the response behind each of them.
TURN_REWARDS, TURN_ENDS = "turn_rewards", "turn_ends"


def by_turn(recipe: Recipe) -> bool:
    """Whether the recipe rewards single turns."""
    return recipe.agent is not None and recipe.agent.credit == "turn"


def turns_of(sample: Sample) -> FloatArray:
    """[K, 2] float32: of each turn the position of its last label in the sample's record, and its reward."""
    ends, rewards = sample.metadata.get(TURN_ENDS, ()), sample.metadata.get(TURN_REWARDS, ())
    # A turn that a budget ended was never answered: it has no reward.
    pairs = zip(ends, rewards, strict=False)
    first = len(sample.prompt.token_ids) - 1
    return np.array([(first + end - 1, reward) for end, reward in pairs], np.float32).reshape(-1, 2)


def turns_before(whole: Sample, chosen: Sample) -> int:
    """How many turns of a sample lie before the first of which anything is trained on. chosen: with less in its mask."""
    if chosen is whole or not chosen.loss_mask.any():
        return 0
    begins = np.diff(whole.loss_mask > 0, prepend=False) & (whole.loss_mask > 0)
    return int(begins[: np.flatnonzero(chosen.loss_mask)[0] + 1].sum()) - 1


def first_turns(blocks: Sequence[Block]) -> IntArray:
    """The number of the first turn that is trained on, from 0, of each sequence of these blocks: [S]."""
    found = [each for block in blocks for each in block.first_turns or [0] * len(block.memories)]
    return np.array(found, np.int64)


def moved_to_turns(at: Sequences, blocks: Sequence[Block]) -> FloatArray:
    """What to add to rewards of tokens that stand at each sequence's last trained one, so that turns have their own: [T].

    A turn's reward comes to its last trained token; where none of it is trained on any more, to the one before. Where there is
    none before, it goes: what is trained on came after it. Else the sum over a sequence is 0.
    """
    moved = np.zeros(len(at.mask), np.float32)
    turns = [each for block in blocks for each in block.turns or ()]
    for index, each in enumerate(turns):
        first, end = at.cu_seqlens[index : index + 2]
        where = np.flatnonzero(at.mask[first:end])
        if not len(where):
            continue
        for position, reward in each:
            moved[first + where[-1]] -= reward
            before = int(np.searchsorted(where, position, side="right"))
            if before:
                moved[first + where[before - 1]] += reward
    return moved
