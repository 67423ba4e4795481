"""What lies in an HF folder beside config and weights, and goes with the model wherever it is saved. Without torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megarl.core.errors import UserError
from megarl.core.json_file import read_object

TEMPLATES, TOKENIZER, TOKENIZER_CONFIG = "additional_chat_templates", "tokenizer.json", "tokenizer_config.json"
# A config's key for classes in Python files beside it. These are code of strangers, which is neither run nor copied.
CODE = "auto_map"
COPIED = (
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "tokenizer*",
    "vocab.*",
    "*.tiktoken",
    "tiktoken.model",
    "tekken.json",
    f"{TEMPLATES}/*.jinja",
)
# And beside a model that sees images.
SEEING = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")


def files_beside(folder: Path, *, sees: bool = False) -> list[Path]:
    """Tokenizer, chat templates and generation settings. Raises UserError for one among them that cannot be read.

    sees: with those that say how images come to the model.
    """
    every, wanted = (
        sorted([*folder.iterdir(), *(folder / TEMPLATES).glob("*.jinja")]),
        (*COPIED, *(SEEING if sees else ())),
    )
    found = [path for path in every if any(path.match(pattern) for pattern in wanted)]
    for path in found:
        check_readable(path)
    return [path for path in found if path.is_file()]


def check_readable(path: Path) -> None:
    """Raises UserError for a file that cannot be read, and for a link that leads nowhere. Folders pass."""
    if path.is_symlink() and not path.exists():
        raise UserError(f"{path} is a link that leads nowhere. Put the file there, or remove the link.")
    try:
        if path.is_file():
            path.open("rb").close()  # file systems of other machines know better than the file's mode
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Let this user read it, or remove it.") from error


def copy_beside(source: Path, target: Path, *, sees: bool = False) -> None:
    """Copy `files_beside` from one model folder to another, where they name no code of the first. Raises UserError.

    A tokenizer that is code alone is still named: readers are to refuse it, and not to take another in silence.
    """
    for path in files_beside(source, sees=sees):
        place = target / path.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, place)
    config, whole = target / TOKENIZER_CONFIG, (target / TOKENIZER).exists()
    if whole and config.exists() and CODE in (raw := read_object(config, "Save the tokenizer again.")):
        del raw[CODE]
        config.write_text(json.dumps(raw, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
