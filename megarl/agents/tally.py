"""What is kept of an episode beside its tokens, and the sample that comes of both: conversation, rewards, numbers.

The same for all that play: an environment in this process (episode.py) and harnesses before the endpoint (harness.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from megarl.agents.environment import Message
from megarl.agents.observations import shown_text
from megarl.agents.transcript import Transcript
from megarl.core.types import Prompt, Sample, Status
from megarl.recipe.agent import ENVIRONMENT
from megarl.rollout.attempt import Attempt, failed_sample
from megarl.rollout.turns import TURN_ENDS, TURN_REWARDS

# What a budget is of, as metrics have it.
Budget = Literal["turns", "tokens", "time"]
BUDGETS: tuple[Budget, ...] = ("turns", "tokens", "time")
# In a sample's metadata, for samples files and graders.
CONVERSATION, TRACE = "messages", "trace"


class Tally:
    """Of one episode. rewards: of each turn."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self.conversation: list[Message] = []
        self.rewards: list[float] = []
        self.metrics: dict[str, float] = {}  # of tools; a later one of the same name counts
        self.turns = 0
        self.generation_s = self.environment_s = self.tools_s = 0.0
        self.num_calls = self.num_call_failures = self.num_cut_results = 0

    @property
    def seconds(self) -> float:
        """That the episode has taken, without those in which it waited for its turn at the servers."""
        return self.generation_s + self.environment_s + self.tools_s

    def say(self, messages: Sequence[Message], tokens: int) -> None:
        """Put messages into the conversation. tokens: of all of them; they stand at the last."""
        shown = [{"role": message["role"], "content": shown_text(message["content"])} for message in messages]
        self.conversation += [*shown[:-1], {**shown[-1], "tokens": tokens}]

    def failed(self, why: str, trace: str = "", *, by_environment: bool = False) -> Sample:
        """The episode as a sample that is not trained on."""
        sample = failed_sample(self._attempt, why)
        sample.metadata |= {CONVERSATION: self.conversation, **({TRACE: trace} if trace else {})}
        sample.numbers = {"environment_failures": float(by_environment)}
        return sample

    def ended(
        self,
        prompt: Prompt,
        transcript: Transcript,
        decode: Callable[[Sequence[int]], str],
        *,
        over: Budget | None = None,
        metrics: Mapping[str, float] | None = None,
        rewards: bool = True,
        more: Mapping[str, float] | None = None,
    ) -> Sample:
        """The episode as a sample, its reward the sum of its turns'.

        over: the budget that ran out. metrics: the environment's. rewards: whether it is the environment that rewards. more:
        further numbers.
        """
        reward = sum(self.rewards)
        sample = transcript.sample(
            sample_id=self._attempt.sample_id,
            group_id=self._attempt.group_id,
            prompt=prompt,
            text=decode(transcript.said.tolist()),
            status=Status.COMPLETED if over is None else Status.TRUNCATED,
        )
        sample.reward, sample.reward_parts = reward, {ENVIRONMENT: reward} if rewards else {}
        sample.metadata = {
            CONVERSATION: self.conversation,
            TURN_REWARDS: self.rewards,
            TURN_ENDS: transcript.turn_ends,
        }
        sample.numbers = {
            "turns": float(self.turns),
            "policy_tokens": float(transcript.num_written),
            "environment_tokens": float(len(transcript.said) - transcript.num_written),
            "generation_s": self.generation_s,
            "environment_s": self.environment_s,
            "environment_failures": 0.0,
            **(more or {}),
            **{f"truncated_by/{each}": float(over == each) for each in BUDGETS},
            **{f"by/{name}": float(value) for name, value in {**self.metrics, **(metrics or {})}.items()},
        }
        return sample
