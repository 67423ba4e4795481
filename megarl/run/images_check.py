"""What can be refused of servers that are to see images before a device is taken."""

from __future__ import annotations

from pathlib import Path

from megarl.core.errors import UserError
from megarl.models.config import ModelConfig
from megarl.models.hf_files import multimodal_of, names_of_text, read_index
from megarl.models.hf_stacked import Stacks
from megarl.models.rules import expected_tensors
from megarl.recipe.schema import Recipe

SEES = "`model.path` is a model that sees images, and "


def check_seeing_servers(recipe: Recipe, model: ModelConfig) -> None:
    """Whether the recipe's servers can see as the model does. Raises UserError.

    SGLang 0.5.21 gives the images of all prompts that it has at the time to the tower at once (managers/mm_schedule.py), whose
    roundings follow from how many these are. Servers that somebody else started may make images larger or smaller. A server that
    begins without weights (FP8) would have none for its tower, which nobody sends. Which layers it computes adapters in beside
    a tower has not been shown.
    """
    if model.vision is None:
        return
    if model.moe is not None and multimodal_of(recipe.model.path).stacked_experts:
        _check_experts(recipe.model.path, model)
    if recipe.rollout.deterministic:
        raise UserError(
            f"`rollout.deterministic`: {SEES}SGLang computes the images of all prompts that wait at once: an answer depends on "
            "what else it answers. Set it to false."
        )
    if recipe.rollout.external is not None:
        raise UserError(
            f"`rollout.servers.urls`: {SEES}at which size images come to servers that somebody else started is not the run's to "
            "say. Set rollout.servers to a number."
        )
    if recipe.rollout.quantization is not None:
        raise UserError(
            f"`rollout.quantization`: {SEES}servers in FP8 begin without weights: nobody would send them those of the vision "
            "tower. Set it to null."
        )
    if recipe.actor.lora is not None and recipe.sync.lora == "adapters":
        raise UserError(
            f"`sync.lora`: {SEES}its servers take no adapters beside a vision tower. Set it to merged: they get whole weights."
        )


def _check_experts(folder: Path, model: ModelConfig) -> None:
    """Whether the experts lie as SGLang takes them. Raises UserError.

    0.5.21 exchanges rows and columns of all that lie in one tensor (models/qwen3_vl_moe.py), transformers of those that would not
    fit otherwise.
    """
    stacks, index = Stacks(expected_tensors(model)), read_index(folder)
    for text, name in names_of_text(index, folder).items():
        stack, shape = stacks.stack(text), index[name].shape
        if stack is None or (stack.exchanged and shape == stack.shape):
            continue
        way_out = (
            f"Write the folder anew, by `megarl convert hf-to-mcore {folder} CHECKPOINT` and `megarl convert mcore-to-hf "
            "CHECKPOINT FOLDER`, and set model.path to it."
            if stack.exchanged
            else "transformers takes a square matrix as it lies. Take a model whose experts have another width."
        )
        raise UserError(
            f"`model.path`: {name} in {folder} is {list(shape)}, and SGLang takes all experts' tensors for published ones, with "
            f"rows and columns of each exchanged. {way_out}"
        )
