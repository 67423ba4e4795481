"""config.json of published models, by their names on the Hugging Face hub: enough to plan for a model that is not here.

The files lie in megarl/model_configs, with their sources. Not for runs: these read their own folder.
"""

from __future__ import annotations

from pathlib import Path

import megarl

FOLDER = Path(megarl.__file__).parent / "model_configs"
# What copies in another dtype are called after the model: its sizes are theirs.
_COPY = "-bf16"


def known_names() -> tuple[str, ...]:
    """The models whose config.json is known: `Qwen/Qwen3-4B`."""
    return tuple(sorted(file.parent.relative_to(FOLDER).as_posix() for file in FOLDER.glob("*/*/config.json")))


def known_config(path: Path | str) -> Path | None:
    """The config.json of the model that a path is named after; None where it is none of them.

    By its whole name on the hub, or by the last part of it: `Qwen/Qwen3-4B`, `models/Qwen3-4B`, `models/Qwen3-4B-bf16`.
    """
    asked = Path(path).as_posix().removesuffix(_COPY)
    found = [name for name in known_names() if name == asked]
    found = found or [name for name in known_names() if name.rpartition("/")[2] == asked.rpartition("/")[2]]
    return FOLDER / found[0] / "config.json" if len(found) == 1 else None
