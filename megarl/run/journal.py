"""The journal of a run as the driver knows it: whether it is this run's still, and what of it a checkpoint makes needless.

What is in it: megarl/rollout/journal.py.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.core.checksums import sum_file
from megarl.core.errors import UserError
from megarl.core.json_file import read_object
from megarl.core.versions import installed
from megarl.recipe.schema import Recipe
from megarl.rollout.journal import JOURNAL, forget
from megarl.training.run_checkpoints import Committed

MADE_WITH = "made_with.json"  # beside the samples
FUNCTION = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):\w+")
# Keys that change neither samples nor what is learned from them: a run may go on with others.
HARMLESS = (
    "run.dir",
    "run.name",
    "cluster.file",
    "cluster.peak_tflops",
    "data.eval",
    "data.eval_config",
    "data.eval_split",
    "deadlines",
    "eval",
    "placement",
    "report",
    "rollout.collectors",
    "rollout.concurrency",
    "rollout.kv_tokens",
    "rollout.longest_first",
    "rollout.max_restarts",
    "rollout.max_running_requests",
    "rollout.offload",
    "rollout.piece_tokens",
    "rollout.server_args",
    "rollout.servers",
    "rollout.tp",
    "sync",
    "train.async_save",
    "train.journal",
    "train.keep_every",
    "train.keep_last",
    "train.save_every",
    "train.steps",
)
PACKAGES = ("torch", "megatron-core")
SHOWN = 5  # differences


def made_with(recipe: Recipe) -> dict[str, Any]:
    """What the samples of a run, and what is learned from them, depend on: plain values by dotted names."""
    values = dict(_leaves(recipe.model_dump(mode="json"), ""))
    found = {name: value for name, value in values.items() if not _harmless(name)}
    if recipe.actor.optimizer.schedule != "constant":
        found["train.steps"] = recipe.train.steps  # learning rates are a part of the way there
    named = (text for name, value in values.items() if name in found for text in _texts(value))
    for text in named:
        if match := FUNCTION.fullmatch(text):
            spec = importlib.util.find_spec(match[1])
            if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
                found[f"source of {text}"] = sum_file(Path(spec.origin)).crc32
    weights = sorted([*recipe.model.path.glob("*.safetensors"), recipe.model.path / "config.json"])
    found["model's files"] = [f"{path.name}: {path.stat().st_size} bytes" for path in weights if path.exists()]
    return found | {package: installed(package) for package in PACKAGES}


def check_journal(recipe: Recipe, *, discard: bool) -> None:
    """Whether the journal in the run's folder, where there is one, can be gone on with.

    discard: it is removed. Raises UserError where it was written by what would sample or learn otherwise.
    """
    folder = recipe.run.folder / JOURNAL
    if discard:
        shutil.rmtree(folder, ignore_errors=True)
    if not recipe.train.journal or not (folder / MADE_WITH).exists():
        return
    before = read_object(folder / MADE_WITH, "Begin a journal anew with --discard-journal.")
    now: dict[str, Any] = json.loads(json.dumps(made_with(recipe)))
    changed = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    if changed:
        told = [f"  {name} was {before.get(name)!r} and is {now.get(name)!r}" for name in changed[:SHOWN]]
        more = [f"  and {len(changed) - SHOWN} more"] if len(changed) > SHOWN else []
        raise UserError(
            "\n".join(
                [
                    f"{folder}, which has the samples since the last checkpoint, was written by a run that would not train on "
                    "them as this one does:",
                    *told,
                    *more,
                    "Go on with what it was written with, or sample all after the checkpoint anew by --discard-journal.",
                ]
            )
        )


def begin_journal(recipe: Recipe, *, keeps: bool) -> None:
    """Write down what the journal is made with. keeps: what there is of one is this run's; else nothing is there afterwards."""
    folder = recipe.run.folder / JOURNAL
    if not keeps:
        shutil.rmtree(folder, ignore_errors=True)
    if recipe.train.journal:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{MADE_WITH}.tmp"
        temporary.write_text(json.dumps(made_with(recipe), indent=1))
        temporary.replace(folder / MADE_WITH)


def trim_journal(folder: Path, checkpoints: list[Committed]) -> None:
    """Forget groups that no checkpoint needs to go on from. folder: the run's. checkpoints: those kept, oldest first."""
    if checkpoints:
        oldest = checkpoints[0]
        waiting = [int(step) for _, step, _ in oldest.state.get("data", {}).get("waiting", ())]
        forget(folder / JOURNAL, before=min([oldest.step + 1, *waiting]))


def _harmless(name: str) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in HARMLESS)


def _texts(value: Any) -> list[str]:
    """A text, or those of a list: of tools there may be several."""
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
