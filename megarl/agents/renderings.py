"""Where an episode's next sequence begins: what the chat template makes of the whole conversation, turn by turn.

For recipes whose episodes are split where the template rewrites earlier turns. Not for tokens that are there already
(transcript.py), nor for what stands between two turns of a sequence that goes on (template.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from megarl.agents.environment import Message
from megarl.agents.template import ChatTemplate, assistant, difference
from megarl.core.types import TokenArray


class Renderings:
    """Of one episode. first: its first messages."""

    def __init__(self, template: ChatTemplate, first: Sequence[Message]) -> None:
        self._template = template
        self._messages = [*first]
        self._seen = template.prompt(first)[1]

    def next(self, wrote: str, told: Sequence[Message]) -> TokenArray | None:
        """What the next sequence begins with, where one begins here: the conversation up to the policy's next turn, [P].

        None: the conversation begins as the policy saw it, and the sequence goes on. Texts are compared, and white space around
        turns is not looked at: that the policy wrote a text with other tokens than the tokenizer would is no rewriting.

        wrote: the policy's last turn, with its special tokens, but for its end. told: the messages after it.
        Raises TemplateRefusalError.
        """
        self._messages += [assistant(wrote), *self._template.as_text(told)]
        ids, text = self._template.prompt(self._messages)
        before, self._seen = self._seen + wrote, text
        return ids if difference(before, text) else None
