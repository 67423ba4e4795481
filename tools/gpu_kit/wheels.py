"""Which wheels the kit carries: what the engine and its tests import, with all that it needs, as the lock has it; not torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tools.gpu_kit.parts import KitError

# What megarl's engine, its sync and their tests import.
WANTED = (
    *("megatron-core", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "psutil"),
    *("pydantic", "pyyaml", "typer", "rich", "aiohttp", "orjson", "zstandard", "jinja2", "dill", "pillow"),
    *("pytest", "pytest-timeout", "hypothesis"),
)
# What is there already: the kit must not stand before it.
THERE = ("torch",)
# manylinux of glibc 2.28 and older, newest first: pip takes exactly what is named.
TAGS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_26_x86_64", "manylinux_2_24_x86_64")
TAGS = (*TAGS, "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_12_x86_64", "manylinux2010_x86_64")
TAGS = (*TAGS, "manylinux_2_5_x86_64", "manylinux1_x86_64")
PIN = re.compile(r"^(?P<name>[a-z0-9][a-z0-9._-]*)==(?P<version>\S+)$")
VIA = re.compile(r"^ +#( +via)? +(?P<name>[a-z0-9][a-z0-9._-]*)$")


@dataclass(frozen=True)
class Lock:
    """versions: of each package. needs: what each package names itself."""

    versions: Mapping[str, str]
    needs: Mapping[str, frozenset[str]]


def read_lock(text: str) -> Lock:
    """A lock as uv writes it: `name==version`, and below it, in comments, the packages that name it."""
    versions: dict[str, str] = {}
    needs: dict[str, set[str]] = {}
    name = ""
    for line in text.splitlines():
        if pin := PIN.match(line):
            name = pin["name"]
            versions[name] = pin["version"]
        elif (via := VIA.match(line)) and name:
            needs.setdefault(via["name"], set()).add(name)
    return Lock(versions, {package: frozenset(found) for package, found in needs.items()})


def chosen(lock: Lock, wanted: Collection[str] = WANTED, there: Collection[str] = THERE) -> dict[str, str]:
    """Name -> version of all that is wanted and needed, in the order of names.

    Raises KitError for what the lock does not have.
    """
    if unknown := sorted(set(wanted) - lock.versions.keys()):
        raise KitError(f"The lock has no {', '.join(unknown)}: compile it anew (make lock), or leave them out.")
    found: set[str] = set()
    left = [name for name in wanted if name not in there]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += [need for need in lock.needs.get(name, ()) if need not in there]
    return {name: lock.versions[name] for name in sorted(found)}


def download_words(pins: Mapping[str, str], python: str, folder: str) -> Sequence[str]:
    """The arguments of pip that fetch these wheels for another Python, and nothing that they name."""
    words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    words += ["--python-version", python, "--dest", folder]
    for tag in TAGS:
        words += ["--platform", tag]
    return [*words, *(f"{name}=={version}" for name, version in pins.items())]
