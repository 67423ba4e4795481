"""Prompts with their answers: rows of a file, tokenised, handed out in an order that a seed decides.

A string prompt is rendered as one user message where the tokenizer has a chat template, and encoded as it stands where
it has none. Not for demonstrations (sft.py), nor for responses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.core.types import Image, Prompt, TokenArray
from megarl.data.answers import ENDS_KEY, Answer, final_answer, thinking_ends
from megarl.data.chat import (
    ROW_KWARGS,
    SYSTEMS,
    Message,
    Tokenizer,
    check_messages,
    check_unrendered,
    encode,
    has_chat_template,
    opens_turn,
    render,
    row_template_kwargs,
    special_texts,
    turn_mark,
)
from megarl.data.digests import TEMPLATE, Digester
from megarl.data.heard import Hearing
from megarl.data.image_places import as_text, check_spelled, expanded, in_parts, placed, spellings
from megarl.data.images import Sight, identity, paths_of, row_images
from megarl.data.row_set import ROWS_PER_BATCH, count_rows
from megarl.data.rows import Row, json_type, read_rows, without_field
from megarl.recipe.schema import PROMPT_PLACE, Data

ANSWER_KEYS = ("answer", "label", "reward_model.ground_truth")
# A row may hold its further fields in one object (slime's rows do): graders get them as if they stood in the row.
METADATA_KEY = "metadata"
# Graders get the prompt as text that the template rendered; this field of their metadata has the messages behind it.
MESSAGES_KEY = "prompt_messages"

# A row may bound its own response, below rollout.max_response_tokens.
BOUND_KEY = "max_response_tokens"


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one file, in the file's order."""

    prompts: tuple[Prompt, ...]
    num_dropped: int  # over the length limit

    @property
    def without_answer(self) -> tuple[Prompt, ...]:
        """Those whose answer is empty: no response is right by it, though a grader of one's own may not ask."""
        return tuple(prompt for prompt in self.prompts if _is_empty(prompt.answer))

    def __len__(self) -> int:
        return len(self.prompts)


def digests_of(prompts: Sequence[Prompt], data: Data) -> dict[str, str]:
    """What a saved place in these rows is a place in. Of messages, not of text: a chat template may write the day's date."""
    digester = Digester()
    for prompt in prompts:
        said = prompt.metadata.get(MESSAGES_KEY, prompt.text)
        if prompt.images:
            said = [said, *map(identity, prompt.images)]
        options = data.chat_template_kwargs
        digester.add({"ids": prompt.id, "prompts": said, "answers": prompt.answer, TEMPLATE: options})
    return digester.digests()


def _is_empty(answer: Answer) -> bool:
    return not any(str(each).strip() for each in (answer if isinstance(answer, list) else [answer] if answer else []))


@dataclass(frozen=True)
class PromptRow:
    """What a row says, before tokens."""

    row: Row
    prompt: str | list[Message]
    answer: Answer
    metadata: dict[str, Any]
    max_response_tokens: int | None = None
    images: tuple[Image, ...] = ()  # of which each has its place in the prompt

    @property
    def messages(self) -> list[Message]:
        """The prompt as chat messages: a string is one message of the user."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt


def parse_row(
    row: Row, data: Data, *, answered: bool = True, sight: Sight | None = None, parts: bool = False
) -> PromptRow:
    """Prompt, answer and metadata of a row. Raises UserError naming file, line and field.

    answered: False for rows that need no answer: without one it is empty. sight: how the model sees images; without, none is
    looked at. parts: messages may have places of images all the same.
    """
    prompt = row.get(data.prompt_key, "the prompt, data.prompt_key")
    if parts or (sight is not None and data.images_key is not None):
        prompt = as_text(prompt, f"{row.where}, field {data.prompt_key!r}")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError(
                f"{row.where}, field {data.prompt_key!r}: the prompt is empty. Fill it, or leave the row out."
            )
    else:
        prompt = _check_prompt_type(prompt, row, data.prompt_key)
        if not any(message["content"].strip() for message in prompt):
            raise UserError(
                f"{row.where}, field {data.prompt_key!r}: all messages are empty. Fill them, or leave the row out."
            )
        if prompt[-1]["role"] == "assistant":
            raise UserError(
                f"{row.where}, field {data.prompt_key!r}: the last message is the assistant's, but that is what the "
                "model is to write. End the prompt with the user's message."
            )
    answer_key = _answer_key(row, data, answered=answered)
    answer = _answer(row, answer_key, data) if answer_key is not None else ""
    metadata = _metadata(row, (data.prompt_key, *filter(None, [answer_key])))
    found = PromptRow(row, _framed(prompt, data), answer, metadata, _bound(row))
    return found if sight is None or data.images_key is None else _with_images(found, data.images_key, sight)


def _with_images(parsed: PromptRow, key: str, sight: Sight) -> PromptRow:
    """The row with its images, each at its place; graders are told of paths, and of no bytes."""
    images = row_images(parsed.row, key, sight)
    paths = {key: paths} if (paths := paths_of(images)) else {}
    prompt = placed(parsed.prompt, len(images), parsed.row, key)
    return replace(parsed, prompt=prompt, images=images, metadata=without_field(parsed.metadata, key) | paths)


def check_rows(path: Path, data: Data, *, answered: bool = True) -> int:
    """Check the rows of a file without a tokenizer, and without their images; returns how many there are.

    Raises UserError for the first row that is wrong.
    """
    return count_rows(path, partial(parse_row, data=data, answered=answered, parts=True))


def load_prompts(
    path: Path, tokenizer: Tokenizer, data: Data, *, answered: bool = True, sight: Sight | None = None
) -> PromptSet:
    """Read and tokenise a whole file. answered, sight: see `parse_row`.

    A prompt over data.max_prompt_tokens is counted and dropped, or refused, as data.over_length says.
    Raises UserError: a malformed row, a prompt that is too long (over_length: error), or nothing left.
    """
    prompts: list[Prompt] = []
    num_dropped, hidden = 0, special_texts(tokenizer)
    for parsed, ids, text in _tokenised(path, tokenizer, data, answered=answered, sight=sight):
        if len(ids) == 0:
            raise UserError(f"{parsed.row.where}, field {data.prompt_key!r}: the prompt has no tokens.")
        if len(ids) <= data.max_prompt_tokens:
            metadata = {**parsed.metadata, MESSAGES_KEY: parsed.messages}
            if (ends := thinking_ends(text, hidden)) is not None:
                metadata[ENDS_KEY] = ends
            own = parsed.max_response_tokens, parsed.images
            prompts.append(Prompt(parsed.row.id, ids, text, parsed.answer, metadata, *own))
        elif data.over_length == "drop":
            num_dropped += 1
        else:
            raise UserError(
                f"{parsed.row.where}: the prompt has {len(ids)} tokens, over "
                f"data.max_prompt_tokens={data.max_prompt_tokens}. "
                "Raise the limit, shorten the prompt, or set data.over_length to drop."
            )
    if not prompts:
        raise UserError(
            f"{path}: all {num_dropped} prompts are over data.max_prompt_tokens={data.max_prompt_tokens}. "
            "Raise the limit."
        )
    return PromptSet(tuple(prompts), num_dropped)


def _check_prompt_type(prompt: object, row: Row, key: str) -> list[Message]:
    if not isinstance(prompt, list):
        raise UserError(
            f"{row.where}, field {key!r}: the prompt is {json_type(prompt)}; "
            "wanted is a string or a list of chat messages."
        )
    return check_messages(prompt, row, key)


def _framed(prompt: str | list[Message], data: Data) -> str | list[Message]:
    """The prompt with what the recipe says around it."""
    if isinstance(prompt, str):
        if data.system_prompt is None:
            return _frame(prompt, data)
        prompt = [{"role": "user", "content": prompt}]
    *before, last = prompt
    system: list[Message] = []
    if data.system_prompt is not None and prompt[0]["role"] not in SYSTEMS:
        system = [{"role": "system", "content": data.system_prompt}]
    return [*system, *before, {**last, "content": _frame(last["content"], data)}]


def _frame(text: str, data: Data) -> str:
    return (data.prompt_template or PROMPT_PLACE).replace(PROMPT_PLACE, text) + data.prompt_suffix


def _answer(row: Row, answer_key: str, data: Data) -> Answer:
    answer = row.get(answer_key, "the answer, data.answer_key")
    if isinstance(answer, list | dict):
        if data.final_answer:
            raise UserError(
                f"{row.where}, field {answer_key!r}: the answer is {json_type(answer)}, and data.final_answer takes the end of a "
                "text. Set it to false, or name the field with the text in data.answer_key."
            )
        found: Answer = row.said(answer)
        are_texts = isinstance(found, list) and all(map(_is_text_or_number, found))
        return [_text_of(each, row, answer_key) for each in found] if are_texts else found
    if not _is_text_or_number(answer):
        raise UserError(
            f"{row.where}, field {answer_key!r}: the answer is {json_type(answer)}; wanted is a string or a number, a list of "
            "them, or an object for a reward of your own."
        )
    text = _text_of(answer, row, answer_key)
    return _final_answer(text, row, answer_key) if data.final_answer else text


def _is_text_or_number(answer: object) -> bool:
    return isinstance(answer, str | int | float | Decimal) and not isinstance(answer, bool)


def _text_of(answer: Any, row: Row, answer_key: str) -> str:
    if isinstance(answer, float | Decimal) and not math.isfinite(answer):
        raise UserError(
            f"{row.where}, field {answer_key!r}: the answer is {answer}, which is no number. Leave the row out."
        )
    return answer if isinstance(answer, str) else _digits(answer)


def _digits(number: int | float | Decimal) -> str:
    """Digits alone: Python would write 0.00001 as 1e-05, which is no answer that a model gives.

    Nor is 5.0, which a column of whole numbers becomes where one is missing, or 5.00, as a column of Parquet's decimals has it.
    """
    if isinstance(number, int):
        return str(number)
    text = format(Decimal(str(number or 0.0)), "f")  # of -0.0 too
    return text.rstrip("0").removesuffix(".") if "." in text else text


def _final_answer(answer: str, row: Row, key: str) -> str:
    found = final_answer(answer)
    if found is None:
        raise UserError(
            f"{row.where}, field {key!r}: the answer has no `####` and no \\boxed{{}} that closes, and data.final_answer takes "
            "what is marked so. Mark it, or set data.final_answer to false."
        )
    return found


def _bound(row: Row) -> int | None:
    """Most tokens of this row's responses, where it says so."""
    inner = row.fields.get(METADATA_KEY)
    bound = row.fields.get(BOUND_KEY, inner.get(BOUND_KEY) if isinstance(inner, dict) else None)
    if bound is None:
        return None
    if isinstance(bound, bool) or not isinstance(bound, int) or bound < 1:
        raise UserError(
            f"{row.where}, field {BOUND_KEY!r}: it is {bound!r}; wanted is a whole number of tokens, at least 1: the longest "
            "response to this row. Mend it, or leave the field out: rollout.max_response_tokens bounds all rows."
        )
    return bound


def _answer_key(row: Row, data: Data, *, answered: bool) -> str | None:
    if data.answer_key is not None:
        return data.answer_key
    for key in ANSWER_KEYS:
        if row.has(key):
            return key
    if not answered:
        return None
    for key in ANSWER_KEYS:
        if key in row.fields:
            raise row.missing(key, "the answer")
    there = ", ".join(sorted(map(repr, row.fields)))
    raise UserError(
        f"{row.where}: there is no answer: none of the fields {', '.join(map(repr, ANSWER_KEYS))}. "
        f"Fields of this row: {there}. Name the right one in data.answer_key."
    )


def _metadata(row: Row, used: tuple[str, ...]) -> dict[str, Any]:
    """What graders get beside prompt and answer: the row's other fields, and those of its object `metadata`."""
    outer = {key: value for key, value in row.fields.items() if key not in used}
    inner = outer.pop(METADATA_KEY) if isinstance(outer.get(METADATA_KEY), dict) else {}
    for key in inner:
        if key in outer:
            raise UserError(
                f"{row.where}: the field {key!r} stands in the row and in its {METADATA_KEY!r} as well, and a reward gets "
                "both under one name. Rename or leave out one of them."
            )
    found = {**outer, **inner}
    if MESSAGES_KEY in found:
        raise UserError(
            f"{row.where}: the field {MESSAGES_KEY!r} is what a reward gets the prompt's messages under. Rename the row's."
        )
    return found


def _tokenised(
    path: Path, tokenizer: Tokenizer, data: Data, *, answered: bool, sight: Sight | None
) -> Iterator[tuple[PromptRow, TokenArray, str]]:
    """Each row with its ids and the text that they stand for."""
    templated, mark = has_chat_template(tokenizer), turn_mark(tokenizer)
    if data.system_prompt is not None and not templated:
        raise UserError(
            "data.system_prompt: the model's tokenizer has no chat template, in which the system could say something. Put the "
            "text into data.prompt_template, or add chat_template to tokenizer_config.json."
        )
    if opens_turn(_frame("", data), mark):
        raise UserError(
            f"data.prompt_template, with data.prompt_suffix, ends with {mark!r}, as the model's chat template opens the "
            "assistant's turn: all of it would be rendered again, within a message of the user. Leave out what the chat template "
            "writes."
        )
    rows, hearing = (parse_row(row, data, answered=answered, sight=sight) for row in read_rows(path)), Hearing()
    spelled = spellings(tokenizer, sight) if sight is not None else []
    while batch := list(islice(rows, ROWS_PER_BATCH)):
        for parsed in batch:
            if not answered and parsed.row.fields.get(ROW_KWARGS):
                raise UserError(
                    f"{parsed.row.where}, field {ROW_KWARGS!r}: later turns of an episode are rendered as the recipe says. Set "
                    f"data.{ROW_KWARGS} for all rows, and leave the field out."
                )
            said = parsed.row.get(data.prompt_key, "")
            if isinstance(said, str):
                check_unrendered(said, mark, parsed.row, framed=data.prompt_template is not None)
        texts = [_text(parsed, tokenizer, templated, hearing) for parsed in batch]
        ids = encode(tokenizer, texts, special_tokens=not templated)
        if sight is not None:
            for parsed in batch:
                check_spelled(parsed.messages, spelled, parsed.row)
            ids = [expanded(each, parsed.images, sight, parsed.row) for each, parsed in zip(ids, batch, strict=True)]
        yield from zip(batch, ids, texts, strict=True)


def _text(parsed: PromptRow, tokenizer: Tokenizer, templated: bool, hearing: Hearing) -> str:
    row_template_kwargs(parsed.row, tokenizer)
    if isinstance(parsed.prompt, str) and not templated and not parsed.images:
        return parsed.prompt

    def shown(messages: Sequence[Message]) -> str:
        said = in_parts(messages) if parsed.images else messages
        return render(tokenizer, said, parsed.row, generation_prompt=True)

    text = shown(parsed.messages)
    hearing.check(text, parsed.messages, shown, parsed.row)
    return text
