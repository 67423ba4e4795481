"""What lies in an HF folder beside config and weights, and goes with the model wherever it is saved. Without torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from megarl.core.errors import UserError

COPIED = (
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "tokenizer*",
    "vocab.*",
)


def files_beside(folder: Path) -> list[Path]:
    """Tokenizer, chat templates and generation settings. Raises UserError for a link among them that leads nowhere."""
    found = [path for path in sorted(folder.iterdir()) if any(path.match(pattern) for pattern in COPIED)]
    for path in found:
        if path.is_symlink() and not path.exists():
            raise UserError(f"{path} is a link that leads nowhere. Put the file there, or remove the link.")
    return [path for path in found if path.is_file()]


def copy_beside(source: Path, target: Path) -> None:
    """Copy them from one model folder to another. Raises UserError."""
    for path in files_beside(source):
        shutil.copyfile(path, target / path.name)
