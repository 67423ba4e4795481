"""A reward model that an SGLang server has (--is-embedding), asked by /classify: of whatever family and tokenizer.

The conversation is rendered by that model's own chat template, into its own tokens: the policy's text is not what it knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.core.errors import TemplateRefusalError, UserError
from megarl.data.chat import Message, Tokenizer, apply_template, has_chat_template, load_tokenizer
from megarl.data.prompts import MESSAGES_KEY
from megarl.data.spelled import Spelled
from megarl.rewards.grade import Grade, Item, number
from megarl.rewards.http import ANSWER_SHOWN

CONVERSATION = "messages"  # in the metadata of an episode: all that was said
QUESTION: Message = {"role": "user", "content": "1+1?"}


class ClassifyForm:
    """The form (single.py) of a conversation for a reward model.

    output: which of its numbers is the score. episodes: what is graded has its whole conversation in its metadata.
    """

    def __init__(self, tokenizer: Tokenizer, output: int = 0, *, episodes: bool = False) -> None:
        self._tokenizer, self._output, self._episodes = tokenizer, output, episodes
        self._spelled = Spelled(tokenizer)

    def probe(self) -> dict[str, Any]:
        """A conversation of two words."""
        return self._asking([QUESTION, {"role": "assistant", "content": "2"}])

    def body(self, item: Item) -> dict[str, Any]:
        """The prompt's messages and the response; of an episode, all that was said. Raises what the template raises."""
        if self._episodes:
            return self._asking(item.metadata[CONVERSATION])
        return self._asking([*item.metadata[MESSAGES_KEY], {"role": "assistant", "content": item.response}])

    def reply(self, answer: Any, body: dict[str, Any]) -> int | float:
        """The score, as it was sent. Raises ValueError where there is none, or it is of less than was asked about."""
        numbers = answer.get("embedding") if isinstance(answer, dict) else None
        if not isinstance(numbers, list) or not all(type(each) in (int, float) for each in numbers):
            raise ValueError(f"without scores: {repr(answer)[:ANSWER_SHOWN]}")
        if len(numbers) <= self._output:
            raise ValueError(f"with {len(numbers)} numbers, and the score was to be number {self._output} from 0 on")
        meta, asked = answer.get("meta_info"), len(body["input_ids"])
        if isinstance(meta, dict) and (read := meta.get("prompt_tokens", asked)) != asked:
            raise ValueError(f"to {read} tokens, and was asked with {asked}: a longer --context-length is wanted there")
        found: int | float = numbers[self._output]
        return found

    def grade(self, reply: int | float) -> Grade:
        """The score itself."""
        return number(reply)

    def _asking(self, messages: list[Message]) -> dict[str, Any]:
        # The policy's words are no marks of turns here: it could praise itself in the user's name.
        text = apply_template(self._tokenizer, self._spelled.as_text(messages), generation_prompt=False, closed=True)
        return {"input_ids": self._spelled.encode(text).tolist()}


def check_template(tokenizer: Tokenizer, key: str, prompts: Mapping[str, list[Message]]) -> None:
    """Whether a reward model's chat template renders prompts with an answer to them. key: where it stands in the recipe.

    prompts: their messages, by where they are. Raises UserError.
    """
    form = ClassifyForm(tokenizer)
    for where, messages in prompts.items():
        try:
            form.body(Item("", "2", "", {MESSAGES_KEY: messages}))
        except TemplateRefusalError as error:
            raise UserError(
                f"`{key}`: with {where}, {error} That is the reward model's template: name the tokenizer that the model came "
                "with, leave such rows out, or keep them from this grader by its `only`."
            ) from error


def open_tokenizer(folder: Path, key: str) -> Tokenizer:
    """Of a reward model. key: where it stands in the recipe. Raises UserError where it cannot render a conversation."""
    if not folder.is_dir():
        raise UserError(
            f"`{key}`: there is no folder {folder}. Name one with the reward model's tokenizer and config.json."
        )
    tokenizer = load_tokenizer(folder)
    if not has_chat_template(tokenizer):
        raise UserError(
            f"`{key}`: the tokenizer of {folder} has no chat template to render a conversation by. Add the reward model's to its "
            "tokenizer_config.json."
        )
    return tokenizer
