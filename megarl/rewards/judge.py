"""A language model that grades, asked over an OpenAI-compatible address. What it is asked is question.py's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megarl.recipe.reward import Judge
from megarl.rewards.grade import Grade, Item
from megarl.rewards.http import ANSWER_SHOWN
from megarl.rewards.question import read_score

PROBE = "Answer with one word: are you there?"


class JudgeForm:
    """The form (single.py) of a question to a model."""

    def __init__(self, settings: Judge, question: Callable[..., str]) -> None:
        """question: what `compile_template` returned."""
        self._settings, self._question = settings, question

    def probe(self) -> dict[str, Any]:
        """A question of one word."""
        return self._asking(PROBE)

    def body(self, item: Item) -> dict[str, Any]:
        """The question about a response. Raises what the template raises."""
        return self._asking(self._question(**item.said))

    def reply(self, answer: Any, _: dict[str, Any]) -> tuple[str, bool]:
        """The reply, and whether it was cut off at its most tokens."""
        try:
            choice = answer["choices"][0]
            reply = choice["message"]["content"]
        except (KeyError, IndexError, TypeError):
            reply = None
        if not isinstance(reply, str):
            raise ValueError(f"without a reply: {repr(answer)[:ANSWER_SHOWN]}")
        return reply, choice.get("finish_reason") == "length"

    def grade(self, reply: tuple[str, bool]) -> Grade:
        """The score in it."""
        text, cut_off = reply
        return read_score(text, self._settings.parse, self._settings.scale, cut_off=cut_off)

    def _asking(self, question: str) -> dict[str, Any]:
        settings = self._settings
        body = {
            "model": settings.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
        }
        return {name: value for name, value in body.items() if value is not None}
