"""Runs what a page tells its reader to do: its files are written, its Python is run, its commands are given.

A fenced block under a line that is only a name in backquotes and a colon is that file. A block of `console` holds commands
after `$ ` and, below each, what it prints: parts of it, in their order, `...` between them. `megarl train`, `sft`, `rm` and
`dpo` are run by tests/support/dry: the real checks, data, loop and files, but no Ray, servers or Megatron. Other
blocks (`bash`, `py`: another system's) are left alone.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

import megarl
from megarl.command_line import app
from megarl.core.errors import MegarlError
from megarl.recipe.load import KINDS
from tests.support.dry import driver

ROOT = Path(megarl.__file__).parent.parent
DOCS = ROOT / "docs"
NAME = re.compile(r"`([\w./-]+)`:")
REFUSED = re.compile(r"^megarl: ", re.MULTILINE)
SHELL = {"cat", "head", "ls", "python"}  # commands that are given as they are


@dataclass(frozen=True)
class Block:
    """One fenced block. name: the file that it is, if any."""

    language: str
    text: str
    name: str | None


@dataclass(frozen=True)
class Command:
    """One command of a console block, and what it prints."""

    line: str
    prints: str


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in their order."""
    before = ""
    lines = iter(page.splitlines())
    for line in lines:
        if line.startswith("```"):
            text = ""
            for inner in lines:
                if inner == "```":
                    break
                text += f"{inner}\n"
            name = NAME.fullmatch(before)
            yield Block(line[3:], text, name[1] if name else None)
            before = ""
        elif line.strip():
            before = line.strip()


def commands(text: str) -> Iterator[Command]:
    """The commands of a console block."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, prints = part.replace("\\\n", " ").partition("\n")
        yield Command(" ".join(line.split()), prints)


def follow(page: str, folder: Path) -> int:
    """Do all that a page says, in that folder. Returns how many commands it gave."""
    count = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        patch.setenv("COLUMNS", "200")
        own = set(sys.modules)
        try:
            for block in blocks(page):
                if block.name:
                    path = folder / block.name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(block.text)
                elif block.language == "python":
                    exec(compile(block.text, "page", "exec"), {"__name__": "page"})
                elif block.language == "console":
                    for command in commands(block.text):
                        printed = give(command.line, folder)
                        refused, told = (REFUSED.search(text) is not None for text in (printed, command.prints))
                        assert refused == told, f"{command.line}: {printed}"
                        check(command.prints, printed, command.line)
                        count += 1
        finally:
            for name in set(sys.modules) - own:  # modules of this page: the next may have others of the same name
                if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                    del sys.modules[name]
    return count


def give(line: str, folder: Path) -> str:
    """What a command prints, on both streams."""
    first, *rest = shlex.split(line)
    if first == "megarl" and rest[0] in KINDS:
        return _dry(rest, folder)
    if first == "megarl":
        result = CliRunner().invoke(app, rest)
        if isinstance(result.exception, MegarlError):
            return f"{result.output}megarl: {result.exception}"
        assert result.exit_code == 0, (line, result.output, result.exception)
        return result.output
    assert first in SHELL, f"{line}: no test knows how to run this"
    line = line.replace("python ", f"{sys.executable} ", 1) if first == "python" else line
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, (line, done.stderr)
    return done.stdout + done.stderr


def _dry(arguments: list[str], folder: Path) -> str:
    command, recipe, *overrides = arguments
    resume = "--resume" in overrides
    # The actors have devices; a page speaks to who has none.
    overrides = ["cluster.platform=cpu", *(each for each in overrides if not each.startswith("--"))]
    temp = folder / "temp"
    temp.mkdir(exist_ok=True)
    try:
        driver.run(KINDS[command], Path(recipe), overrides, temp, resume=resume)
    except MegarlError as error:
        return f"megarl: {error}"
    return ""


def check(wanted: str, found: str, where: str) -> None:
    """What a page shows has to be there, in that order; blanks, line breaks and frames of tables aside."""
    seen, at = _plain(found), 0
    for part in (_plain(each) for each in re.split(r"\.\.\.", wanted)):
        position = seen.find(part, at)
        assert position >= 0, f"{where}: the page shows {part!r}; the command printed: {seen}"
        at = position + len(part)


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[─-╿]|\x1b\[[0-9;]*m", " ", text).split())
