"""The parallel layouts that a recipe asks for, and the shards that fit them all."""

from __future__ import annotations

import math

from megarl.core.layout import Layout
from megarl.recipe.roles import Critic, Parallel, Reference, RewardModel, Teacher
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.recipe.supervised import DpoRecipe


def layout_of(parallel: Parallel, devices: int) -> Layout:
    """A section's layout over so many devices. Raises UserError when they do not fit."""
    return Layout(
        tp=parallel.tp,
        pp=parallel.pp,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.etp,
        vpp=parallel.virtual_stages,
        sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
        first_stage_layers=parallel.first_stage_layers,
        last_stage_layers=parallel.last_stage_layers,
        world_size=devices,
    )


def role_layouts(recipe: AnyRecipe) -> dict[str, Layout]:
    """The layout of every Megatron role, by the section that decides it. Raises UserError."""
    devices = recipe.cluster.devices
    layouts = {"actor": layout_of(recipe.actor.parallel, devices)}
    for role, section in _sections(recipe).items():
        if section is not None:
            own = section.parallel
            layouts[role] = layouts["actor"] if own is None else layout_of(own, devices)
    return layouts


def _sections(recipe: AnyRecipe) -> dict[str, Reference | Critic | RewardModel | Teacher | None]:
    """The sections of the roles beside the actor; None for those that the recipe does not ask for."""
    if isinstance(recipe, DpoRecipe):
        return {"reference": recipe.reference}
    if not isinstance(recipe, Recipe):
        return {}
    return {
        "reference": recipe.reference if recipe.algorithm.kl_coef > 0 else None,
        "critic": recipe.critic,
        "reward_model": recipe.reward_model,
        "teacher": recipe.teacher,
    }


def kept_roles(recipe: Recipe) -> list[str]:
    """The roles that change in a run, and so are in its checkpoints; the actor first."""
    critic = ["critic"] if recipe.critic is not None else []
    reference = ["reference"] if recipe.algorithm.kl_coef > 0 and recipe.reference.refresh_every is not None else []
    return ["actor", *critic, *reference]


def num_shards(recipe: AnyRecipe) -> int:
    """Shards that a step's samples are dealt in: every data-parallel rank of every role gets as many of them."""
    return math.lcm(*(layout.dp for layout in role_layouts(recipe).values()))
