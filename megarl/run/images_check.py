"""What can be refused of servers that are to see images before a device is taken."""

from __future__ import annotations

from megarl.core.errors import UserError
from megarl.models.config import ModelConfig
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
