"""What a collector is asked to make: groups of samples, and held-out answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megarl.core.types import FloatArray, IntArray
from megarl.data.mix import rows_by_set
from megarl.data.prompts import PromptSet, digests_of
from megarl.recipe.schema import Data
from megarl.rollout.facts import Flags, GroupFacts


@dataclass(frozen=True)
class GroupTask:
    """Samples of one prompt.

    group: its number. row: of the data. step: whose seeds and names the samples have. first: number of the first sample
    among those of this row in this step. count: how many. greedy: also one greedy answer. expected_tokens: of a response,
    by what earlier groups of this row took; 0 where there were none. recorded: the journal may have it.
    """

    group: int
    row: int
    step: int
    first: int
    count: int
    greedy: bool = False
    expected_tokens: float = 0.0
    recorded: bool = False


@dataclass(frozen=True)
class DataFacts:
    """What a collector has read. rows: prompts to train on; dropped: those that were too long; eval_rows: held out.

    digests: of what the rows to train on say. sets: rows of each set of data.mix, where there is one.
    """

    rows: int
    dropped: int
    eval_rows: int
    digests: Mapping[str, str] = field(default_factory=dict)
    sets: Mapping[str, IntArray] = field(default_factory=dict)

    @classmethod
    def of(cls, prompts: PromptSet, data: Data, eval_rows: int = 0) -> DataFacts:
        """Of these rows. data: the recipe's section."""
        digests, sets = digests_of(prompts.prompts, data), rows_by_set(prompts.prompts, data)
        return cls(len(prompts), prompts.num_dropped, eval_rows, digests, sets)


@dataclass(frozen=True)
class News:
    """Groups that have finished since the last news, and those that the journal was to have and has not."""

    finished: list[GroupFacts]
    missing: Sequence[int] = ()

    @classmethod
    async def of(cls, told: asyncio.Queue[GroupFacts | int | BaseException]) -> News:
        """All that is there, once there is something: what has finished, numbers of what is missing. Raises what failed."""
        found = [await told.get()]
        while not told.empty():
            found.append(told.get_nowait())
        for each in found:
            if isinstance(each, BaseException):
                raise each
        finished = [each for each in found if isinstance(each, GroupFacts)]
        return cls(finished, [each for each in found if isinstance(each, int)])


@dataclass(frozen=True)
class Load:
    """Of a collector. busy_s: seconds that its servers have worked so far. queued: its requests that wait for their turn.

    journal_s: seconds so far in which it wrote samples down.
    """

    busy_s: float
    queued: int
    journal_s: float = 0.0


@dataclass(frozen=True)
class EvalFacts:
    """Held-out answers of one collector, n of them: rows [n] of the held-out data, each with its samples in order.

    versions: the smallest and the largest weight version of any token; None where nothing was answered. failure,
    grade_failure, numbers: as of GroupFacts. sets: what each answer's row says of its set; empty where nobody asks.
    """

    rows: IntArray
    rewards: FloatArray
    scores: FloatArray
    response_tokens: IntArray
    truncated: Flags
    failed: Flags
    ungraded: Flags
    versions: tuple[int, int] | None
    failure: str = ""
    grade_failure: str = ""
    numbers: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    sets: tuple[str, ...] = ()
