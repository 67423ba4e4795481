"""What a path is: an HF folder, or a Megatron checkpoint of megarl, by itself or within a run. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from megarl.core.errors import DamageError, UserError
from megarl.training.manifest import HF_FOLDER, MANIFEST, checkpoint_damage
from megarl.training.run_checkpoints import MARKER, Checkpoints, step_damage

CHECKPOINTS, RECIPE = "checkpoints", "recipe.yaml"
# What the folder of a step stands for; another role is named by its own folder in it.
ACTOR = "actor"


@dataclass(frozen=True)
class Source:
    """A model on disk.

    folder: with config.json and safetensors (hf), or with megarl.json (mcore). step: the step's folder that a checkpoint
    lies in. recipe: of its run. Both are None where there is none. is_whole: its content was read, and is what was written.
    """

    kind: Literal["hf", "mcore"]
    folder: Path
    step: Path | None = None
    recipe: Path | None = None
    is_whole: bool = field(default=False, compare=False)

    @property
    def hf(self) -> Path:
        """The folder with the HF config and tokenizer."""
        return self.folder if self.kind == "hf" else self.folder / HF_FOLDER

    def damage(self, *, read: bool) -> list[str]:
        """What is wrong with a checkpoint's files. read: also compare the content; HF folders have no checksums."""
        if self.kind == "hf":
            return []
        read = read and not self.is_whole
        return checkpoint_damage(self.folder, read=read) if self.step is None else step_damage(self.step, read=read)


def find_source(path: Path, *, read: bool = True) -> Source:
    """What lies at a path: a run's folder stands for its newest whole checkpoint. Raises UserError where nothing does.

    read: whether that one's content is compared as well; sizes alone where not.
    """
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}. Name an HF folder, a Megatron checkpoint of megarl, or a run's folder.")
    if (path / CHECKPOINTS).is_dir():
        return _newest(Checkpoints(path / CHECKPOINTS, keep_last=1), read=read)
    if (path / ACTOR).is_dir():
        return _in_step(path)
    if (path / MANIFEST).exists():
        return _in_step(path.parent, path.name) if (path.parent / MARKER).exists() else Source("mcore", path)
    if (path / "config.json").exists():
        return Source("hf", path)
    if (path / "metadata.json").exists():
        raise UserError(
            f"{path} holds Megatron's files but no {MANIFEST}: it was not finished, or not written by megarl. Take another "
            "checkpoint of the run, or export it to HF with the program that wrote it."
        )
    raise UserError(
        f"{path} holds no model: an HF folder has a config.json, a Megatron checkpoint of megarl a {MANIFEST}, a run "
        f"{CHECKPOINTS}/."
    )


def _newest(checkpoints: Checkpoints, *, read: bool) -> Source:
    found = [] if read else checkpoints.committed()
    if found:
        return _in_step(found[-1].folder)
    whole, damaged = checkpoints.newest_whole()
    if whole is None:
        error = UserError(
            f"{checkpoints.folder} holds no committed checkpoint.{damaged} Name another run, or an HF folder: a run writes "
            "its own as it ends."
        )
        raise DamageError(str(error)) if damaged else error
    return replace(_in_step(whole.folder), is_whole=True)


def _in_step(step: Path, role: str = ACTOR) -> Source:
    recipe = step.parent.parent / RECIPE
    return Source("mcore", step / role, step, recipe if recipe.exists() else None)


def require(path: Path, kind: Literal["hf", "mcore"], instead: str) -> Source:
    """A whole source of this kind. Raises UserError for the other kind, and for damaged files. instead: what to call."""
    source = find_source(path)
    if source.kind != kind:
        names = {"hf": "an HF folder", "mcore": "a Megatron checkpoint"}
        raise UserError(f"{path} is {names[source.kind]}, and {names[kind]} is needed here. {instead}")
    if problems := source.damage(read=True):
        raise UserError(
            f"{source.folder} is damaged: {'; '.join(problems)}. Take another checkpoint; nothing was written."
        )
    return source
