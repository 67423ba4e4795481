"""Which token pads a model that scores: transformers reads a score at the last token that is not `pad_token_id`.

Where texts end with that token, it would read an earlier one's score; where there is none, it scores one text at a time. Only
the exported folder is changed: in training, the row of `pad_token_id` would stop to learn.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.core.json_file import read_object
from megarl.core.log import get_logger
from megarl.data.chat import Tokenizer, load_tokenizer, special_ids

log = get_logger(__name__)

GENERATION = "generation_config.json"
# special_tokens_map.json is written by older versions of transformers, and has the last word in all.
_NAMING = ("tokenizer_config.json", "special_tokens_map.json")


def name_padding(folder: Path, named: Path) -> None:
    """Have config and tokenizer of an exported model name a token as padding that no text ends with.

    named: what the folder will be called, for the log, which says so where there is no such token.
    """
    config = read_object(folder / "config.json", "Export the model again.")
    try:
        tokenizer = load_tokenizer(folder)
    except UserError as error:
        log.warning("%s: which token pads was not looked at. %s", named, error)
        return
    generation = folder / GENERATION
    found = padding_id(
        tokenizer, config, read_object(generation, "Export the model again.") if generation.is_file() else {}
    )
    if found is None:
        log.warning(
            "%s: the tokenizer has no special token that no text ends with. Give transformers one text at a time, "
            "with model.config.pad_token_id = None: else it reads scores of other tokens than the last.",
            named,
        )
        return
    _write(folder / "config.json", config | {"pad_token_id": found})
    if found != tokenizer.pad_token_id:
        token = tokenizer.convert_ids_to_tokens(found)
        for path in (folder / name for name in _NAMING):
            if path.exists():
                _write(path, read_object(path, "Export the model again.") | {"pad_token": token})


def padding_id(tokenizer: Tokenizer, config: dict[str, Any], generation: dict[str, Any]) -> int | None:
    """The tokenizer's own padding where no text ends with it, else another special token; None where there is none.

    Texts end with an end token, that of a response among them (generation: generation_config.json), or with what the chat
    template has. Names with "pad" come first, the first token of texts last.
    """
    template = str(tokenizer.chat_template or "")
    ends = (each.get("eos_token_id") for each in (config, generation))
    taken = [tokenizer.eos_token_id, *chain.from_iterable(each if isinstance(each, list) else [each] for each in ends)]
    texts = {number: str(tokenizer.convert_ids_to_tokens(number)) for number in sorted(special_ids(tokenizer))}
    free = [
        number
        for number, text in texts.items()
        if number not in taken and text not in template and number < config["vocab_size"]
    ]
    if tokenizer.pad_token_id in free:
        return int(tokenizer.pad_token_id)
    return min(
        free, key=lambda number: ("pad" not in texts[number].lower(), number == tokenizer.bos_token_id), default=None
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
