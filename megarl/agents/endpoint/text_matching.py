"""Whether a prompt without chat goes on where an earlier completion ended: as text, or as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.agents.endpoint.model import Model
from megarl.agents.endpoint.refusal import RefusedError
from megarl.agents.endpoint.replies import Choice
from megarl.core.types import TokenArray


@dataclass(frozen=True)
class Extension:
    """chosen: of the policy's choices that the prompt goes on with. ids: of what is new. shown: as text."""

    chosen: int
    ids: TokenArray
    shown: str


class KnownText:
    """What was asked last and answered, in the form in which it was asked; nothing before the first prompt."""

    def __init__(self) -> None:
        self._known: str | list[int] | None = None
        self._matched = ""  # the stop string that ended the last answer

    def extended(self, prompt: str | list[int], choices: Sequence[Choice], model: Model) -> Extension:
        """How a prompt goes on after what is known and the last answer, of which there are these choices.

        A stop string that ended the answer is in its tokens and not in its text: a prompt that begins with it goes on behind it.
        Raises RefusedError where it does not go on.
        """
        if self._known is None:
            ids = model.first_ids(prompt)
            return Extension(0, ids, prompt if isinstance(prompt, str) else model.decode(prompt))
        if isinstance(prompt, list):
            model.check_ids(prompt)
        if isinstance(prompt, str) != isinstance(self._known, str):
            raise RefusedError(
                "The episode's prompts are text or token ids, and not both by turns.", code="kind", param="prompt"
            )
        for number, choice in enumerate([*choices] or [None]):
            if isinstance(prompt, str) and isinstance(self._known, str):
                before = self._known + (choice.text if choice else "")
                if prompt.startswith(before):
                    rest = prompt[len(before) :]
                    told = rest.removeprefix(_matched(choice) if choice else self._matched)
                    return Extension(number, model.encode(told, first=False), told)
            elif isinstance(prompt, list) and isinstance(self._known, list):
                known = [*self._known, *(choice.generation.token_ids.tolist() if choice else ())]
                if prompt[: len(known)] == known:
                    rest_ids = prompt[len(known) :]
                    return Extension(number, np.array(rest_ids, np.int32), model.decode(rest_ids))
        raise RefusedError(
            "This prompt does not extend the episode's text. An episode is trained on as one sequence of tokens: each prompt "
            "begins with the one before it and the model's answer to that.",
            code="conversation_not_extended",
            param="prompt",
        )

    def told(self, prompt: str | list[int]) -> None:
        """A prompt that was answered."""
        self._known, self._matched = prompt, ""

    def wrote(self, choice: Choice) -> None:
        """The answer to it that the conversation goes on with."""
        if isinstance(self._known, str):
            self._known, self._matched = self._known + choice.text, _matched(choice)
        elif self._known is not None:
            self._known = [*self._known, *choice.generation.token_ids.tolist()]


def _matched(choice: Choice) -> str:
    """The stop string that ended a choice, if one did."""
    found = choice.generation.matched
    return found if isinstance(found, str) else ""
