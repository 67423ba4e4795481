"""`megarl quickstart`: what the quickstart's recipes read, made on the spot; nothing is downloaded."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import typer

from megarl.core.errors import MegarlError, UserError

# The paths that the recipes name.
INPUTS, RECIPES = Path(".cache/quickstart"), Path("recipes")


def quickstart() -> None:
    """Make a tiny model with random weights and an arithmetic task here, and copy the recipes that train it.

    Then call `megarl sft recipes/quickstart_sft.yaml` and `megarl train recipes/quickstart.yaml`: minutes on two CPU cores.
    """
    from megarl.core.shipped import shipped
    from megarl.recipe.examples import copy_example

    for folder in (INPUTS, RECIPES):
        _check_writable(folder)
    for script, name in (("make_tiny_model.py", "model"), ("make_arithmetic.py", "data")):
        if not (INPUTS / name).exists():
            half = INPUTS / f".{name}"  # it has its name once it is whole
            shutil.rmtree(half, ignore_errors=True)
            command = [sys.executable, str(shipped("tools") / script), "--out", str(half)]
            made = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
            typer.echo(made.stdout.replace(str(half), str(INPUTS / name)), nl=False)
            if made.returncode:
                raise MegarlError(f"The quickstart's {name} could not be made; what failed is above.")
            half.rename(INPUTS / name)
    for name in ("quickstart_sft", "quickstart"):
        if not (RECIPES / f"{name}.yaml").exists():
            copy_example(name, RECIPES)
    typer.echo(
        "Now:\n  megarl sft recipes/quickstart_sft.yaml   # a warm start\n  megarl train recipes/quickstart.yaml     # GRPO"
    )


def _check_writable(folder: Path) -> None:
    """Make the folder. Raises UserError where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"{folder.absolute()} cannot be written to: {error.strerror}. Change into a folder of your own, and call megarl "
            "quickstart there."
        ) from error
