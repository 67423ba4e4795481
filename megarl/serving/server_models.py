"""Which of SGLang's models a server has to load: by default it imports all, some 200 files. Reads them, imports none."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from pathlib import Path

VARIABLE = "SGLANG_DISABLED_MODEL_ARCHS"  # SGLang's own: modules of sglang.srt.models that are not imported
ENTRY = re.compile(r"^EntryClass\b[^=]*=\s*(\[[^\]]*\]|[^\n]+)", re.MULTILINE)  # what a module registers


def unused_models(model: Path) -> tuple[str, ...]:
    """Names of SGLang's modules that register no architecture of this HF folder.

    None where no module registers one: what SGLang makes of such a model is for it to say, with all that it has.
    """
    config = model / "config.json"
    wanted = set(json.loads(config.read_text()).get("architectures") or ()) if config.exists() else set()
    known = _known()
    used = {name for name, registered in known.items() if registered & wanted}
    return tuple(sorted(set(known) - used)) if used else ()


@cache
def _known() -> dict[str, set[str]]:
    """Of each of SGLang's modules the architectures that it registers."""
    return {file.stem: _registered(file) for file in _folder().glob("*.py")}


def _registered(file: Path) -> set[str]:
    text = file.read_text()
    at = text.find("\nEntryClass")  # much faster than the expression, which tries every line
    found = ENTRY.search(text, at) if at >= 0 else None
    return set(re.findall(r"\w+", found[1])) if found else set()


def _folder() -> Path:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations, "the package sglang is not installed"
    return Path(spec.submodule_search_locations[0]) / "srt" / "models"
