"""The example recipes that come with megarl: what each is for, how many devices it wants, and copies of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.core.shipped import RECIPES, shipped, shipped_recipe
from megarl.core.words import did_you_mean
from megarl.recipe.load import command_of, detect_kind, load_recipe
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.recipe.source import base_of

# By cluster.platform: what people call the devices, and how many of them a server's rank has to itself.
KINDS_OF_DEVICES = {"cuda": ("GPUs", 1), "cpu": ("CPU", 0), "auto": ("CPU or GPU", 0)}


@dataclass(frozen=True)
class Example:
    """An example recipe. command: of megarl, that runs it. devices: for people. about: how its comment begins."""

    name: str
    command: str
    devices: str
    about: str


def examples() -> Iterator[Example]:
    """All of them by name; what others only build on is none."""
    paths = sorted(shipped(RECIPES).glob("*.yaml"))
    bases = {base_of(path) for path in paths}
    for path in paths:
        if path not in bases:
            kind: Any = detect_kind(path)
            recipe = load_recipe(path, [], kind).recipe
            yield Example(path.stem, command_of(kind), _devices(recipe), _about(path))


def copy_example(name: str, target: Path) -> list[Path]:
    """Copy an example, and what it builds on, into a folder; returns the files, the example first.

    Raises UserError: no example of that name, a file that is there already (but for a base that would be copied as it is), or a
    folder that cannot be written.
    """
    source = shipped_recipe(name)
    if source is None:
        names = [example.name for example in examples()]
        hint = did_you_mean(name, names)
        raise UserError(f"megarl brings no recipe {name!r}.{hint} There are: {', '.join(names)}.")
    base = base_of(source)
    copies = {each: target / each.name for each in (source, base) if each is not None}
    # Several build on the same: what is there already as it would be copied is in nobody's way.
    there = [str(copy) for each, copy in copies.items() if copy.exists() and (each == source or not _same(each, copy))]
    if there or (target.exists() and not target.is_dir()):
        what = (
            f"{' and '.join(there)} {'is' if len(there) == 1 else 'are'} there already"
            if there
            else f"{target} is a file, and a folder is wanted"
        )
        raise UserError(f"{what}; nothing was copied. Name another folder: megarl recipe copy {name} FOLDER.")
    try:
        target.mkdir(parents=True, exist_ok=True)
        for each, copy in copies.items():
            copy.write_bytes(each.read_bytes())
    except OSError as error:
        raise UserError(
            f"{error.filename or target} cannot be written: {error.strerror}. Name another folder."
        ) from error
    return list(copies.values())


def _same(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()


def _devices(recipe: AnyRecipe) -> str:
    """Of the run: one of a platform's devices a rank, and on GPUs `rollout.tp` a server that gives nothing back to ranks."""
    servers = recipe.rollout.server_devices if isinstance(recipe, Recipe) and not recipe.rollout.offload else 0
    what, beside = KINDS_OF_DEVICES[recipe.cluster.platform]
    number = recipe.cluster.devices + beside * servers
    return f"{number} {what.removesuffix('s') if number == 1 else what}"


def _about(path: Path) -> str:
    head = re.match(r"(?:#.*\n)+", path.read_text(encoding="utf-8"))
    assert head, f"{path} does not say what it is"
    text = " ".join(line.removeprefix("#").strip() for line in head[0].splitlines())
    return re.split(r"[:.] | \(|\.$", text)[0]
