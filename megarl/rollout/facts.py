"""What is told of a group once its samples are generated and graded: numbers, never tokens.

Collectors keep the tokens; the coordinator decides by these what a step is made of, who gets what, and what it was like.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megarl.core.types import FloatArray, IntArray, VersionSpan

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class GroupFacts:
    """A finished group of n samples. Arrays are [n], in the order in which the samples were asked for.

    group: its number. usable: has a response and a grade. mean_nll: minus the mean log-prob, at rollout, of the trained
    tokens. spans: which weight versions wrote which of each sample's trained tokens, counted from its first.
    greedy_reward: of the greedy answer to the prompt; nan where nobody asked for one or it has no grade. greedy_tokens: of
    that answer. parts: each grader's score by its name, nan where it gave none. numbers: what else is counted of a sample,
    by name (Sample.numbers), nan where it has none of it.
    failure, grade_failure: why the first sample without a response has none, and why the first answered one has no grade;
    empty where there is none. Of the greedy answer: num_greedy asked for, greedy_failed, greedy_ungraded.
    recorded: it was not made now, the journal had it.
    sequences: tokens of each sequence of each sample, where one has several; empty where each is one.
    """

    group: int
    prompt_tokens: IntArray
    response_tokens: IntArray
    trained_tokens: IntArray
    rewards: FloatArray
    mean_nll: FloatArray
    usable: Flags
    truncated: Flags
    failed: Flags
    ungraded: Flags
    spans: tuple[tuple[VersionSpan, ...], ...]
    greedy_reward: float = float("nan")
    greedy_tokens: int = 0
    parts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    numbers: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    failure: str = ""
    grade_failure: str = ""
    num_greedy: int = 0
    greedy_failed: int = 0
    greedy_ungraded: int = 0
    recorded: bool = False
    sequences: tuple[tuple[int, ...], ...] = ()

    @property
    def oldest(self) -> int | None:
        """The oldest weight version that wrote a token of a usable sample; None where there is none."""
        versions = [span.version for spans, ok in zip(self.spans, self.usable, strict=True) if ok for span in spans]
        return min(versions, default=None)

    @property
    def flawed(self) -> bool:
        """Whether a sample, or the greedy answer, has no response or no grade."""
        return bool(self.failed.any() or self.ungraded.any() or self.greedy_failed or self.greedy_ungraded)

    @property
    def num_tokens(self) -> IntArray:
        """Prompt and response tokens together: [n]."""
        return self.prompt_tokens + self.response_tokens
