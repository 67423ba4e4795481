"""Files that come with megarl and are no code: example recipes, the job script, what makes the quickstart's inputs.

They lie at the top of a checkout, where readers look for them; a wheel has them within the package (setup.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import megarl

RECIPES: Literal["recipes"] = "recipes"


def shipped(folder: Literal["recipes", "launch", "tools"]) -> Path:
    """Where one of these folders is."""
    package = Path(megarl.__file__).parent
    within = package / "shipped" / folder
    return within if within.is_dir() else package.parent / folder


def shipped_recipe(name: str) -> Path | None:
    """The example recipe of that name, with or without `.yaml`; None where there is none."""
    path = shipped(RECIPES) / f"{Path(name).name.removesuffix('.yaml')}.yaml"
    return path if path.is_file() else None
