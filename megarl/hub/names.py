"""What a name on the hub looks like, and which folder of its cache is which repository."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["model", "dataset"]
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(\w[\w./-]*))?")
_ADDRESS = re.compile(r"([a-z][a-z0-9]+):/+")
_FOLDER = re.compile(r"(model|dataset)s--(.+)")


@dataclass(frozen=True)
class Repo:
    """A repository of the hub. revision: branch, tag or commit; None: its main branch."""

    kind: Kind
    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    @property
    def noun(self) -> str:
        """For people."""
        return {"model": "model", "dataset": "data set"}[self.kind]

    @property
    def page(self) -> str:
        """Path of its page on the hub."""
        return self.name if self.kind == "model" else f"datasets/{self.name}"


def hub_name(path: Path, kind: Kind) -> Repo | None:
    """The repository that a recipe's path names: OWNER/NAME or OWNER/NAME@REVISION, where nothing of that name is here."""
    found = _NAME.fullmatch(str(path))
    if found is None or "--" in found[1] or ".." in found[1] or path.exists():
        return None
    return Repo(kind, found[1], found[2])


@dataclass(frozen=True)
class Cached:
    """A place in a cache of the hub. cache: its root. rest: below the snapshot of the repository's commit."""

    repo: Repo
    cache: Path
    rest: str


def in_cache(path: Path) -> Cached | None:
    """What a path in a cache of the hub is a copy of: CACHE/models--OWNER--NAME/snapshots/COMMIT/REST."""
    for folder in path.parents:
        commit = path.relative_to(folder).parts[0]
        found = _FOLDER.fullmatch(folder.parent.name)
        if folder.name == "snapshots" and found:
            kind: Kind = "model" if found[1] == "model" else "dataset"
            repo = Repo(kind, found[2].replace("--", "/"), commit)
            return Cached(repo, folder.parent.parent, str(path.relative_to(folder / commit)))
    return None


def address(path: Path) -> str | None:
    """What was written, where it is an address such as https://...; None where it is a path. A Path keeps one slash of two."""
    found = _ADDRESS.match(str(path))
    return None if found is None or path.exists() else f"{found[1]}://{str(path)[found.end() :]}"
