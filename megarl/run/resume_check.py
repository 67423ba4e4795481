"""Whether a recipe can go on from the checkpoint of the run in its folder, before anything is started or written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.data.digests import Digests, differing
from megarl.data.mix import shares_of
from megarl.models.config import ModelConfig
from megarl.models.fingerprint import fingerprint
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.training.manifest import HF_FOLDER, read_manifest, read_model_config
from megarl.training.run_checkpoints import Committed


def check_resumed(recipe: AnyRecipe, committed: Committed, rows: int, digests: Digests) -> None:
    """Raise UserError where a checkpoint cannot be what this recipe goes on from; with what it was made with.

    rows: training rows within the length limit; digests: of what they say. Adapters are compared whole: with others the
    checkpoint's would be left out, and with another alpha they would be another model. Their order is not.
    """
    saved: dict[str, Any] = committed.state.get("data", {})
    known: dict[str, tuple[str, Any]] = {
        "rows of data.train": ("num_rows", rows),
        "run.seed": ("seed", recipe.run.seed),
        "data.shuffle": ("shuffle", recipe.data.shuffle),
        "data.mix": ("mix", shares_of(recipe.data)),
    }
    pairs = {name: (saved.get(key, now), now) for name, (key, now) in known.items()}
    roles: dict[str, Any] = {"actor": recipe.actor}
    if isinstance(recipe, Recipe) and recipe.critic is not None:
        roles["critic"] = recipe.critic
    for name, section in roles.items():
        manifest = read_manifest(committed.role(name))
        if manifest.optimizer is not None:
            optimizer = section.optimizer
            others = manifest.other_state(optimizer.name, optimizer.momentum, recipe.model.dtype)
            pairs |= {key if key == "model.dtype" else f"{name}.{key}": both for key, both in others.items()}
            froze = manifest.optimizer.get("freeze_router", False)  # then it has no state of them
            pairs[f"{name}.optimizer.freeze_router"] = froze, optimizer.freeze_router
            stood = manifest.optimizer.get("freeze_vision_tower", True)  # then it is not among the weights
            pairs[f"{name}.optimizer.freeze_vision_tower"] = stood, optimizer.freeze_vision_tower
        if name == "actor":
            lora = None if section.lora is None else section.lora.model_dump(mode="json")
            pairs["actor.lora"] = _in_order(manifest.lora), _in_order(lora)
    changed = [f"  {name} was {was!r} and is {now!r}" for name, (was, now) in pairs.items() if was != now]
    if saved.get("num_rows") == rows:  # otherwise they are others anyhow
        changed += [f"  {name} of the rows of data.train are others" for name in differing(saved, digests)]
    # A checkpoint of an older megarl does not say which model it began with.
    if committed.state.get("model") not in (None, fingerprint(recipe.model.path)):
        changed.append(f"  {recipe.model.path} (model.path) is another model than it began with")
    if isinstance(recipe, Recipe) and recipe.critic is not None:
        path = recipe.critic.path or recipe.model.path
        if _scored(path) != _scored(committed.role("critic") / HF_FOLDER):
            changed.append(f"  {path} (critic.path) is another model than it began with")
    if changed:
        told = "\n".join(changed)
        raise UserError(
            f"{committed.folder}, which the run would go on from, was made with others:\n{told}\n"
            "Resume with what it was made with, or start a new run (run.name=...)."
        )


def _scored(folder: Path) -> ModelConfig:
    """What a folder says of its model, as a critic; a checkpoint's is never quantised, and may have a tower in its weights."""
    config = read_model_config(folder).with_score_head()
    vision = None if config.vision is None else replace(config.vision, tower=(), newer_names=False)
    return replace(config, fp8_block=None, mxfp4=False, vision=vision)


def _in_order(lora: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if lora is None else {**lora, "targets": sorted(lora["targets"])}
