"""One attempt at a prompt: what a collector hands to whoever plays it, and what that has to give back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from megarl.core.types import Prompt, Sample, Status
from megarl.rollout.asking import Asker
from megarl.rollout.pictures import Pictures
from megarl.rollout.seeds import Purpose, environment_seed, request_seed
from megarl.serving.sampling import Sampling


@dataclass(frozen=True)
class Attempt:
    """One attempt at a prompt. sampling: without a seed; its max_tokens bound the whole response.

    step: whose seeds and names it has. index: of the sample in its group. expected_tokens: of the response, see Gate.
    pictures: of the prompt, which all attempts at it share.
    """

    prompt: Prompt
    sampling: Sampling
    run_seed: int
    purpose: Purpose
    step: int
    index: int
    expected_tokens: float = 0.0
    pictures: Pictures | None = None
    group_id: str = field(init=False)
    sample_id: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "group_id", f"{self.step}/{self.prompt.id}")
        object.__setattr__(self, "sample_id", f"{self.group_id}/{self.index}")

    def seeded(self, turn: int = 0, choice: int = 0) -> Sampling:
        """How the response of this turn is sampled; of several, each is a choice with a number."""
        seed = request_seed(self.run_seed, self.purpose, self.step, self.prompt.id, self.index, turn, choice)
        return replace(self.sampling, seed=seed)

    @property
    def environment_seed(self) -> int:
        """What all attempts of a group have in common."""
        return environment_seed(self.run_seed, self.purpose, self.step, self.prompt.id)


class Player(Protocol):
    """Plays an attempt to its end: asks the servers once, or turn by turn."""

    async def play(self, attempt: Attempt, asker: Asker) -> Sample:
        """One sample, before it is graded. What goes wrong with this one alone is its failure, and raises nothing."""

    async def close(self) -> None:
        """Give back what it holds; nothing is played any more."""


def failed_sample(attempt: Attempt, failure: str) -> Sample:
    """A sample without a response, and why there is none."""
    return Sample(
        id=attempt.sample_id,
        group_id=attempt.group_id,
        prompt=attempt.prompt,
        response_ids=np.zeros(0, np.int32),
        response_text="",
        loss_mask=np.zeros(0, np.uint8),
        rollout_logprobs=np.zeros(0, np.float32),
        versions=(),
        status=Status.FAILED,
        metadata={"failure": failure},
    )
