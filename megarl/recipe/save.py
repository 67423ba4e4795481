"""Writes into a run's folder what the run was made of: the resolved recipe, the versions, the state of the source.

Not the run's results: those are the report's and the checkpoints'.
"""

from __future__ import annotations

import json
import os
import platform as host
import subprocess
import sys
from pathlib import Path
from typing import Any

import megarl
from megarl.core.disk import replace_text
from megarl.core.platform import get_platform
from megarl.core.versions import installed, matches, pins
from megarl.recipe.batch import plan_batches
from megarl.recipe.load import Loaded
from megarl.recipe.source import dump_yaml

RECIPE_FILE = "recipe.yaml"
PROVENANCE_FILE = "provenance.json"


def save_recipe(loaded: Loaded[Any], folder: Path) -> None:
    """Write `recipe.yaml`, which loads back to the same recipe, and `provenance.json`. Whole files, or none."""
    folder.mkdir(parents=True, exist_ok=True)
    header = f"# Resolved from {loaded.path}: base, command line and defaults put together. Paths are relative to\n"
    header += f"# {Path.cwd()}, where megarl was called.\n"
    # Names of folders need not be UTF-8, and this file has to be; the keys were refused where they are not.
    header = header.encode(errors="backslashreplace").decode()
    replace_text(folder / RECIPE_FILE, header + dump_yaml(loaded.resolved), lasting=True)
    replace_text(folder / PROVENANCE_FILE, json.dumps(provenance(loaded), indent=1) + "\n", lasting=True)


def provenance(loaded: Loaded[Any]) -> dict[str, Any]:
    """Where the recipe came from and what it ran on, as plain values."""
    wanted = pins()
    found = {name: installed(name) for name in wanted}
    return {
        "recipe": {"file": str(loaded.path), "overrides": list(loaded.overrides), "sources": loaded.sources},
        "hub": loaded.commits,
        "batch": plan_batches(loaded.recipe).describe(),
        "versions": {name: {"installed": found[name], "pinned": wanted[name]} for name in wanted},
        "differs_from_pins": sorted(
            name for name, version in found.items() if not version or not matches(version, wanted[name])
        ),
        "git": git_state(Path(megarl.__file__).parent.parent),
        "platform": {
            "name": get_platform(loaded.recipe.cluster.platform).name,
            "python": sys.version.split()[0],
            "system": host.platform(),
            "machine": host.machine(),
            "cores": len(os.sched_getaffinity(0)),
        },
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and changed files of the checkout that megarl runs from; None where it does not run from one."""
    if not (folder / ".git").exists():
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if commit is None or status is None:
        return None
    return {"commit": commit, "changed": [line[3:] for line in status.splitlines()]}


def _git(folder: Path, *command: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None  # no git, not a repository, or one that belongs to somebody else: the run does not need it
    return result.stdout.rstrip("\n")
