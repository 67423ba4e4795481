"""The parallel layouts that a recipe asks for, and the shards that fit them all."""

from __future__ import annotations

import math

from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.recipe.placement import Pool, RoleName
from megarl.recipe.roles import Critic, Parallel, Reference, RewardModel, Teacher
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.recipe.supervised import DpoRecipe, KtoRecipe, with_reference

SHARED = "ranks"  # the name of the one pool, where the recipe names none


def layout_of(parallel: Parallel, devices: int) -> Layout:
    """A section's layout over so many devices. Raises UserError when they do not fit."""
    return Layout(
        tp=parallel.tp,
        pp=parallel.pp,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.etp,
        vpp=parallel.vpp,
        sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
        first_stage_layers=parallel.first_stage_layers,
        last_stage_layers=parallel.last_stage_layers,
        world_size=devices,
    )


def role_layouts(recipe: AnyRecipe) -> dict[str, Layout]:
    """The layout of every Megatron role, by the section that decides it. Raises UserError."""
    devices = {role: pool.devices for pool in pools_of(recipe).values() for role in pool.roles}
    sections = {role: section for role, section in _sections(recipe).items() if section is not None}
    own = {role: section.parallel or recipe.actor.parallel for role, section in sections.items()}
    parallels = {"actor": recipe.actor.parallel, **own}
    return {role: layout_of(parallel, devices[role]) for role, parallel in parallels.items()}


def pools_of(recipe: AnyRecipe) -> dict[str, Pool]:
    """The pools of devices, each with the roles that the run has. Raises UserError unless each role is in exactly one."""
    roles: list[RoleName] = ["actor", *(role for role, section in _sections(recipe).items() if section is not None)]
    named = recipe.placement.pools if isinstance(recipe, Recipe) else {}
    if not named:
        return {SHARED: Pool(devices=recipe.cluster.devices, roles=tuple(roles))}
    hosted = [role for pool in named.values() for role in pool.roles]
    problems = [
        *(f"{role} is in no pool" for role in roles if role not in hosted),
        *(f"{role} is in more than one pool" for role in sorted(set(hosted)) if hosted.count(role) > 1),
        *(f"{role} is in a pool, and the run has none" for role in sorted(set(hosted) - set(roles))),
    ]
    total = sum(pool.devices for pool in named.values())
    if total != recipe.cluster.devices:
        problems.append(f"the pools have {total} devices together, and cluster.devices is {recipe.cluster.devices}")
    if problems:
        raise UserError(
            f"placement.pools does not fit the run: {'; '.join(problems)}. The run's roles: {', '.join(roles)}."
        )
    return dict(named)


def _sections(recipe: AnyRecipe) -> dict[RoleName, Reference | Critic | RewardModel | Teacher | None]:
    """The sections of the roles beside the actor; None for those that the recipe does not ask for."""
    if isinstance(recipe, DpoRecipe | KtoRecipe):
        return {"reference": recipe.reference if with_reference(recipe) else None}
    if not isinstance(recipe, Recipe):
        return {}
    return {
        "reference": recipe.reference if recipe.algorithm.kl_coef > 0 else None,
        "critic": recipe.critic,
        "reward_model": recipe.reward_model,
        "teacher": recipe.teacher if recipe.teacher is not None and recipe.teacher.servers is None else None,
    }


def kept_roles(recipe: Recipe) -> list[str]:
    """The roles that change in a run, and so are in its checkpoints; the actor first."""
    critic = ["critic"] if recipe.critic is not None else []
    reference = ["reference"] if recipe.algorithm.kl_coef > 0 and recipe.reference.refresh_every is not None else []
    return ["actor", *critic, *reference]


def tower_roles(recipe: AnyRecipe) -> set[str]:
    """The roles that have a vision tower as a part of their model: those whose tower learns, and who takes its weights over."""
    roles = set() if recipe.actor.optimizer.freeze_vision_tower else {"actor"}
    if not isinstance(recipe, Recipe):
        return roles
    if roles and "reference" in kept_roles(recipe):
        roles.add("reference")
    if recipe.critic is not None and not recipe.critic.optimizer.freeze_vision_tower:
        roles.add("critic")
    return roles


def num_shards(recipe: AnyRecipe) -> int:
    """Shards that a step's samples are assigned in: every data-parallel rank of every role gets as many of them."""
    return math.lcm(*(layout.dp for layout in role_layouts(recipe).values()))
