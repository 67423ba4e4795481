"""Guess the number: the policy names numbers, and is told whether the secret one is higher or lower."""

from __future__ import annotations

import random
import re

from megarl.agents.environment import Done, EpisodeRow, Message, Response, Turn

NUMBER = re.compile(r"-?\d+")
DIGITS = 1000  # the first ones of a number say where it lies; Python reads no more than 4300


class GuessNumber:
    """The secret is the row's answer, or, where it has none, drawn from low to high: the same for all episodes of a group.

    guesses: that the policy has. Reward 1 for the secret within them, else 0. A turn without a number costs a guess.
    tell_range: what the policy is told has the numbers that are left, as in `higher: 51-99`.
    """

    def __init__(self, low: int = 0, high: int = 99, guesses: int = 7, tell_range: bool = False) -> None:
        if low > high or guesses < 1:
            raise ValueError(
                f"low={low}, high={high}, guesses={guesses}: wanted are low <= high and at least one guess"
            )
        self._low, self._high, self._guesses = low, high, guesses
        self._tell_range = tell_range
        self._secret = low

    async def start(self, row: EpisodeRow) -> list[Message]:
        """The row's own prompt; the secret is chosen."""
        secret = int(str(row.answer)) if row.answer else random.Random(row.seed).randint(self._low, self._high)
        if not self._low <= secret <= self._high:
            raise ValueError(f"row {row.id}: the secret {secret} is not from {self._low} to {self._high}")
        self._secret = secret
        return list(row.messages)

    async def step(self, response: Response) -> Turn | Done:
        """Higher, lower, or the end. The last number in the response is the guess."""
        numbers = NUMBER.findall(response.text)
        guess = int(numbers[-1][:DIGITS]) if numbers else None
        if guess == self._secret:
            return Done(1.0, {"guesses": response.turn + 1.0, "solved": 1.0})
        if response.turn + 1 >= self._guesses:
            return Done(0.0, {"solved": 0.0})
        return Turn([{"role": "user", "content": self._told(guess)}])

    async def close(self) -> None:
        """Nothing is held."""

    def _told(self, guess: int | None) -> str:
        """Of a guess that is not the secret."""
        if guess is None:
            told = "no number"
        elif guess < self._secret:
            told, self._low = "higher", max(self._low, guess + 1)
        else:
            told, self._high = "lower", min(self._high, guess - 1)
        return f"{told}: {self._low}-{self._high}" if self._tell_range else told
