"""Text and chat messages into token ids, with the model's own tokenizer and chat template.

Not for reading rows (rows.py), nor for deciding which tokens are trained on (sft.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from pydantic_core import from_json

from megarl.core.errors import TemplateRefusalError, UserError
from megarl.core.json_file import read_object
from megarl.core.transformers_models import without_models
from megarl.core.types import TokenArray
from megarl.core.words import did_you_mean
from megarl.data.calls import CALLS, parsed_calls, with_arguments_as_text
from megarl.data.rows import Row, json_type

Tokenizer = Any  # transformers.PreTrainedTokenizerBase, which has no type information
Message = dict[str, Any]
# What chat templates know by these names; a template may know others, and then names them.
DEVELOPER = "developer"  # the system, where a template does not know it
ROLES = ("system", DEVELOPER, "user", "assistant", "tool")
SYSTEMS = ("system", DEVELOPER)
TOOLS = "tools"  # of a row
ROW_KWARGS = "chat_template_kwargs"  # of a row, as TRL's rows have them
BLANKS = ("\u2581", "\u0120")  # how SentencePiece writes one, and byte-level BPE
LINE = "\n"
# Messages as JSON, or as Python prints them: what a table or a CSV file makes of a list.
_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*(['"])(role|content)\1\s*:.*\}\s*\]\s*""", re.DOTALL)
_THOUGHTS = re.compile(r"</?think>")  # that templates open, or leave empty, where the assistant begins
QUESTION: Message = {"role": "user", "content": "1+1"}  # that templates are tried with
REASON_CHARACTERS = 400  # of what transformers says
TEMPLATE_KEY = "data.chat_template_kwargs"
# Of content that is a list.
IN_PARTS = " Parts, as images, are for a model that sees images, and data.images_key set."
# What transformers gives a template beside its own arguments.
_GIVEN = {"messages", "strftime_now", "raise_exception"}


def load_tokenizer(folder: Path, template_kwargs: Mapping[str, Any] | None = None) -> Tokenizer:
    """The fast tokenizer of an HF folder, from local files only.

    template_kwargs: what its chat template is given by name whenever it renders, such as Qwen3's enable_thinking.
    Raises UserError where the folder is missing, has no tokenizer that transformers can read, or a template that does not know
    one of these names.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such model folder. Set model.path to a folder in HF format.")
    if _is_code(folder):
        raise UserError(
            f"{folder}: its tokenizer is code that came with it (auto_map in tokenizer_config.json). megarl does not run that, "
            "and transformers would take another tokenizer in its place. Save it as a fast one: tokenizer.json is missing."
        )
    reader = _auto_tokenizer()
    try:
        tokenizer = reader.from_pretrained(folder, local_files_only=True)
        tokenizer(["1+1"])  # some of what is wrong in its files shows only now
    except Exception as error:  # which ones its parsers raise for a file that is broken, no documentation says
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:REASON_CHARACTERS]
        raise UserError(
            f"{folder}: transformers cannot read a tokenizer from this folder ({reason}). "
            "It needs tokenizer.json and tokenizer_config.json beside a config.json that transformers reads."
        ) from error
    if template_kwargs:
        _check_template_kwargs(TEMPLATE_KEY, folder, tokenizer, template_kwargs)
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **template_kwargs)
    return tokenizer


def _check_template_kwargs(place: str, whose: object, tokenizer: Tokenizer, given: Mapping[str, Any]) -> None:
    """Raises UserError for what the chat template would not read, or would be given by somebody else.

    place: the recipe's key, or a row's field. whose: of which the template is.
    """
    if not has_chat_template(tokenizer):
        raise UserError(
            f"{place}: the tokenizer of {whose} has no chat template that could read {', '.join(given)}. Remove the key."
        )
    template = str(tokenizer.chat_template)
    own = _GIVEN.union(signature(tokenizer.apply_chat_template).parameters)
    for name in given:
        if name in own:
            raise UserError(f"{place}.{name}: this is not yours to give: megarl or transformers does. Remove it.")
        if not re.search(rf"\b{re.escape(name)}\b", template):
            hint = did_you_mean(name, set(re.findall(r"[A-Za-z_]\w*", template)) - own)
            raise UserError(
                f"{place}.{name}: the chat template of {whose} does not read that name.{hint} Correct or remove it."
            )


def _is_code(folder: Path) -> bool:
    """Whether the folder's tokenizer is a class of its authors, and no file says the same."""
    path = folder / "tokenizer_config.json"
    if (folder / "tokenizer.json").exists() or not path.exists():
        return False
    classes = read_object(path, "Save the tokenizer again.").get("auto_map")
    return isinstance(classes, list) or (isinstance(classes, dict) and "AutoTokenizer" in classes)


def _auto_tokenizer() -> Any:
    """transformers' AutoTokenizer, without the models."""
    with without_models():
        from transformers import AutoTokenizer
    return AutoTokenizer


def has_chat_template(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer can render chat messages."""
    return bool(tokenizer.chat_template)


def special_ids(tokenizer: Tokenizer) -> set[int]:
    """The special tokens: those that the tokenizer gives a part, and those that it only marks as special.

    Gemma 3's <end_of_turn> is only marked.
    """
    marked = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    return {*tokenizer.all_special_ids, *marked}


def special_texts(tokenizer: Tokenizer) -> set[str]:
    """How the special tokens are spelled."""
    return {str(tokenizer.decode([token], skip_special_tokens=False)) for token in special_ids(tokenizer)}


def check_messages(value: object, row: Row, key: str) -> list[Message]:
    """A field's value as chat messages: a list of objects, each with the strings `role` and `content`.

    A message that calls tools may have no content. What is null or an empty list is left out, and arguments of calls are
    objects, as templates have them. Raises UserError naming file, line, field and message.
    """
    want = 'wanted is a list of messages like {"role": "user", "content": "..."}'
    if not isinstance(value, list):
        raise UserError(f"{row.where}, field {key!r}: {json_type(value)}; {want}.")
    if not value:
        raise UserError(f"{row.where}, field {key!r}: an empty list; {want}.")
    messages = []
    for index, message in enumerate(value):
        where = f"{row.where}, field {key!r}, message {index + 1}"
        if not isinstance(message, dict):
            raise UserError(f"{where}: {json_type(message)}; {want}.")
        kept = {name: part for name, part in message.items() if part is not None and part != []}
        if calls := kept.get(CALLS):
            kept |= {"content": kept.get("content", ""), CALLS: parsed_calls(row.said(calls), where)}
        for part in ("role", "content"):
            if not isinstance(kept.get(part), str):
                found = f"{json_type(message[part])}" if part in message else "missing"
                hint = IN_PARTS if isinstance(kept.get(part), list) else ""
                raise UserError(f"{where}: {part!r} is {found}, and must be a string; {want}.{hint}")
        messages.append(kept)
    return messages


def row_tools(row: Row) -> list[dict[str, Any]]:
    """The tools that a row offers in its field `tools`: a list of JSON schemas, or that list as a JSON string.

    Raises UserError naming file, line and field.
    """
    tools: Any = row.said(row.fields.get(TOOLS))
    want = 'wanted is a list of JSON schemas like {"type": "function", "function": {"name": "..."}}, or its JSON'
    if isinstance(tools, str) and tools.strip():
        try:
            tools = from_json(tools)
        except ValueError as error:
            raise UserError(f"{row.where}, field {TOOLS!r}: a string that is not JSON ({error}); {want}.") from error
    if not tools:
        return []
    if not isinstance(tools, list):
        raise UserError(f"{row.where}, field {TOOLS!r}: {json_type(tools)}; {want}.")
    for tool in tools:
        if not isinstance(tool, dict):
            raise UserError(f"{row.where}, field {TOOLS!r}: {json_type(tool)} in the list; {want}.")
    return tools


def row_template_kwargs(row: Row, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a row gives the chat template by name, in its field `chat_template_kwargs`; it goes before the recipe's.

    Raises UserError naming file, line and field, for what is no object and for names that the template does not read.
    """
    given: Any = row.said(row.fields.get(ROW_KWARGS))
    if not given:
        return {}
    place = f"{row.where}, field {ROW_KWARGS!r}"
    if not isinstance(given, dict):
        raise UserError(f"{place}: {json_type(given)}; wanted is an object of what the chat template reads by name.")
    _check_template_kwargs(place, "the model", tokenizer, given)
    return given


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    row: Row,
    *,
    generation_prompt: bool,
    tools: Sequence[dict[str, Any]] = (),
) -> str:
    """The text of messages under the chat template; with generation_prompt it ends where the assistant's turn begins.

    tools: JSON schemas of functions that the model may call. The row's own kwargs of the template are given to it.
    Raises UserError where there is no template, a role that nobody knows (many templates would render any), or where the
    template refuses the messages.
    """
    if not has_chat_template(tokenizer):
        raise UserError(
            f"{row.where}: the row has chat messages, but the model's tokenizer has no chat template. "
            "Add chat_template to tokenizer_config.json, or give the prompt as a string."
        )
    given = row_template_kwargs(row, tokenizer)
    try:
        return apply_template(tokenizer, messages, generation_prompt=generation_prompt, tools=tools, given=given)
    except TemplateRefusalError as error:
        between = ", " if str(error).startswith("message ") else ": "
        raise UserError(f"{row.where}{between}{error}") from error


def apply_template(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    generation_prompt: bool,
    tools: Sequence[dict[str, Any]] = (),
    given: Mapping[str, Any] = MappingProxyType({}),
    closed: bool = False,
) -> str:
    """As `render`, of messages that are no row's. tools: JSON schemas of functions that the model may call.

    given: what the template is given by name, before the recipe's.
    closed: with what some templates close a whole conversation with, as Phi's do; nothing like it is there where a model goes on.
    Raises TemplateRefusalError.
    """
    if DEVELOPER not in str(tokenizer.chat_template):  # OpenAI's newer name; Qwen's templates leave out what has it
        messages = [{**message, "role": "system"} if message["role"] == DEVELOPER else message for message in messages]
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in ROLES and role not in str(tokenizer.chat_template):
            hint = did_you_mean(role, ROLES, quoted=True)
            raise TemplateRefusalError(
                f"message {number}: there is no role {role!r}.{hint} Roles are {', '.join(ROLES)}, and those "
                "that the model's chat template names."
            )
    shown = partial(tokenizer.apply_chat_template, tokenize=False, tools=list(tools) or None, **given)
    try:
        text = str(shown(list(messages), add_generation_prompt=generation_prompt))
    except Exception as error:  # a template is code of the model's authors
        roles = ", ".join(str(message["role"]) for message in messages)
        refusal = TemplateRefusalError(
            f"the model's chat template refuses these messages ({error}); their roles are {roles}."
        )
        if not any(message.get(CALLS) for message in messages):
            raise refusal from error
        messages = with_arguments_as_text(messages)  # as DeepSeek's templates have them, which know no others
        try:
            text = str(shown(messages, add_generation_prompt=generation_prompt))
        except Exception:  # that was not it
            raise refusal from error
    if generation_prompt or closed:
        return text
    return text.removesuffix(_closing(tokenizer, text, messages, shown))


def _closing(tokenizer: Tokenizer, text: str, messages: Sequence[Message], shown: Callable[..., Any]) -> str:
    """The end token, where the template of a text that ends with it puts it behind a user's message as well; else empty.

    Empty, too, where no other special token ends the turn. messages: the text's. shown: renders messages.
    """
    end = str(tokenizer.eos_token or "")
    if not end or not text.endswith(end):
        return ""
    said = text.removesuffix(end).rstrip()
    if not any(token.special and said.endswith(token.content) for token in tokenizer.added_tokens_decoder.values()):
        return ""
    last = max((at for at, each in enumerate(messages, 1) if each["role"] != "assistant"), default=0)
    for asked in ([QUESTION], list(messages[:last])):
        try:
            closed, opened = (str(shown(asked, add_generation_prompt=each)) for each in (False, True))
        except Exception:  # as templates do that want a system message: what these messages begin with, has one
            continue
        return "" if opened.startswith(closed) or not opened.startswith(closed.removesuffix(end)) else end
    return ""


def turn_mark(tokenizer: Tokenizer) -> str:
    """What the chat template opens the assistant's turn with, where a special token is in it; else empty."""
    if not has_chat_template(tokenizer):
        return ""
    try:
        before, opened = (apply_template(tokenizer, [QUESTION], generation_prompt=each) for each in (False, True))
    except TemplateRefusalError:  # told of with the rows
        return ""
    mark = _THOUGHTS.sub("", opened.removeprefix(before)).strip() if opened.startswith(before) else ""
    special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return mark if any(token in mark for token in special) else ""


def behind_turn(tokenizer: Tokenizer) -> TokenArray | None:
    """Tokens that the chat template puts behind what the assistant says; None where there is no template, or it refuses to."""
    if not has_chat_template(tokenizer):
        return None
    said = "what-the-assistant-said"
    asked = [QUESTION, {"role": "assistant", "content": said}]
    try:
        text = apply_template(tokenizer, asked, generation_prompt=False)
    except TemplateRefusalError:  # told of with the rows
        return None
    (behind,) = encode_behind(tokenizer, [(said, text.partition(said)[2])])
    return behind


def turn_end(tokenizer: Tokenizer) -> int | None:
    """The special token that the chat template ends the assistant's turn with; None where there is no such token or template."""
    behind, special = behind_turn(tokenizer), special_ids(tokenizer)
    return None if behind is None else next((int(token) for token in behind if int(token) in special), None)


def opens_turn(text: str, mark: str) -> bool:
    """Whether a text ends with what opens the assistant's turn. mark: `turn_mark`."""
    return bool(mark) and mark in text and not _THOUGHTS.sub("", text.rpartition(mark)[2]).strip()


def check_unrendered(text: str, mark: str, row: Row, *, framed: bool = False) -> None:
    """Raises UserError for a prompt that is no words of a user's: one that is rendered already, or messages as text.

    mark: `turn_mark`. framed: a template says of the text what it is, which may be a dialogue to speak of.
    """
    if not framed and _MESSAGES_AS_TEXT.fullmatch(text) and all(key in text for key in ("role", "content")):
        raise UserError(
            f"{row.where}: the prompt is text that holds a list of chat messages, {text.strip()[:30]!r}... The model would be "
            "given their brackets and quotes as words of the user. Write the list itself, and not as a string; or, where a user "
            "says just that, [{'role': 'user', 'content': THE TEXT}]."
        )
    if opens_turn(text, mark):
        raise UserError(
            f"{row.where}: the prompt is text that ends with {mark!r}, as the model's chat template opens the assistant's turn. "
            "Such a prompt is rendered already, and would be rendered again, within a message of the user. Give what the user "
            "says alone, or a list of chat messages."
        )


def encode(tokenizer: Tokenizer, texts: Sequence[str], *, special_tokens: bool) -> list[TokenArray]:
    """Token ids of each text, [tokens] int32.

    special_tokens: add what the tokenizer puts before plain text; a rendered chat template holds them already. What it puts
    behind, such as an end token, is left out: something follows on each of these texts.
    """
    if not texts:
        return []
    behind = _num_behind(tokenizer) if special_tokens else 0
    encoded = tokenizer(list(texts), add_special_tokens=special_tokens, return_attention_mask=False)
    return [np.asarray(ids[: len(ids) - behind], dtype=np.int32) for ids in encoded["input_ids"]]


def _num_behind(tokenizer: Tokenizer) -> int:
    """How many tokens the tokenizer puts behind a plain text."""
    alone, framed = (list(tokenizer("1", add_special_tokens=each)["input_ids"]) for each in (False, True))
    places = range(len(framed) - len(alone), -1, -1) if alone else ()
    return next((len(framed) - at - len(alone) for at in places if framed[at : at + len(alone)] == alone), 0)


def encode_behind(tokenizer: Tokenizer, texts: Sequence[tuple[str, str]]) -> list[TokenArray]:
    """Token ids of texts that stand behind others, [tokens] int32 each. texts: (what stands before it, the text itself).

    Some tokenizers, such as Llama 2's, put a blank before whatever they are given, and so before a text that is given alone.
    """
    alone = encode(tokenizer, [text for _, text in texts], special_tokens=False)
    if not puts_blanks(tokenizer):
        return alone
    # What is joined over the border is left apart, as a policy leaves it that writes behind a prompt: it is taken from
    # behind a new line, with which little is joined.
    found = list(alone)
    for fronts in ([LINE] * len(texts), [before for before, _ in texts]):
        before = encode(tokenizer, fronts, special_tokens=False)
        both = encode(
            tokenizer, [front + text for front, (_, text) in zip(fronts, texts, strict=True)], special_tokens=False
        )
        for at, (first, whole) in enumerate(zip(before, both, strict=True)):
            if np.array_equal(whole[: len(first)], first):
                found[at] = whole[len(first) :]
    return found


def puts_blanks(tokenizer: Tokenizer) -> bool:
    """Whether a blank comes before a text that has none."""
    first = tokenizer("a", add_special_tokens=False)["input_ids"][:1]
    return bool(first) and str(tokenizer.convert_ids_to_tokens(first)[0]).startswith(BLANKS)
