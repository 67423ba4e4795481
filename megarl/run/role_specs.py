"""What each Megatron role of a recipe is built from. It starts nothing: megarl/run/session.py does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megarl.recipe.layouts import role_layouts, tower_roles
from megarl.recipe.roles import RewardModel, Teacher
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.recipe.scoring import old_logprobs_given
from megarl.recipe.supervised import DpoRecipe, KtoRecipe, RmRecipe, SftRecipe, SupervisedRecipe, with_reference
from megarl.run.preflight import Preflight
from megarl.training.spec import (
    DpoObjective,
    KtoObjective,
    Objective,
    PolicyObjective,
    RewardObjective,
    RoleSpec,
    SftObjective,
    ValueObjective,
)

ACTOR, REFERENCE, CRITIC, REWARD_MODEL, TEACHER = "actor", "reference", "critic", "reward_model", "teacher"


def role_specs(recipe: Recipe, checked: Preflight) -> dict[str, RoleSpec]:
    """Every role of a reinforcement-learning run, the actor first."""
    actor = actor_spec(recipe, checked)
    specs = {ACTOR: actor}
    if recipe.algorithm.kl_coef > 0:
        specs[REFERENCE] = _reference_spec(actor, recipe)
    if recipe.critic is not None:
        specs[CRITIC] = _critic_spec(recipe, checked, actor)
    if recipe.reward_model is not None:
        specs[REWARD_MODEL] = replace(
            _of_section(actor, REWARD_MODEL, recipe, recipe.reward_model, recipe.reward_model.path), head="score"
        )
    if recipe.teacher is not None and recipe.teacher.path is not None:
        specs[TEACHER] = _of_section(actor, TEACHER, recipe, recipe.teacher, recipe.teacher.path)
    return specs


def supervised_specs(recipe: SupervisedRecipe, checked: Preflight) -> dict[str, RoleSpec]:
    """Every role of a supervised run, the model under training first."""
    specs = {ACTOR: actor_spec(recipe, checked)}
    if isinstance(recipe, DpoRecipe | KtoRecipe) and with_reference(recipe):
        specs[REFERENCE] = _reference_spec(specs[ACTOR], recipe)
    return specs


def actor_spec(recipe: AnyRecipe, checked: Preflight) -> RoleSpec:
    """The model under training."""
    return RoleSpec(
        recipe.model.path.resolve(),
        recipe.model.dtype,
        recipe.rollout.temperature if isinstance(recipe, Recipe) else 1.0,
        optimizer=recipe.actor.optimizer,
        total_steps=checked.plan.optimizer_steps,
        objective=_objective(recipe),
        layout=role_layouts(recipe)[ACTOR],
        recompute=recipe.actor.recompute,
        recompute_num_layers=recipe.actor.recompute_num_layers,
        aux_loss_coef=recipe.actor.aux_loss_coef,
        lora=recipe.actor.lora,
        offload=recipe.actor.offload,
        routing_replay=isinstance(recipe, Recipe) and recipe.actor.routing_replay,
        head="score" if isinstance(recipe, RmRecipe) else "vocabulary",
    )


def _objective(recipe: AnyRecipe) -> Objective:
    if isinstance(recipe, Recipe):
        return PolicyObjective(recipe.algorithm, old_logprobs_given(recipe))
    if isinstance(recipe, RmRecipe):
        return RewardObjective(recipe.rm.center_coef)
    if isinstance(recipe, KtoRecipe):
        return KtoObjective(recipe.kto)
    if isinstance(recipe, DpoRecipe):
        return DpoObjective(recipe.dpo)
    return SftObjective(dft=isinstance(recipe, SftRecipe) and recipe.sft.loss == "dft")


def _reference_spec(actor: RoleSpec, recipe: Recipe | DpoRecipe | KtoRecipe) -> RoleSpec:
    """Under LoRA the reference is the actor, without its adapters. One that is refreshed takes over a tower that learns."""
    base, tower = ACTOR if recipe.actor.lora else None, REFERENCE in tower_roles(recipe)
    return replace(_frozen(actor, REFERENCE, recipe), base_of=base, offload=recipe.reference.offload, has_tower=tower)


def _critic_spec(recipe: Recipe, checked: Preflight, actor: RoleSpec) -> RoleSpec:
    critic = recipe.critic
    assert critic is not None
    return RoleSpec(
        (critic.path or recipe.model.path).resolve(),
        actor.dtype,
        optimizer=critic.optimizer,
        total_steps=checked.plan.critic_steps,
        objective=ValueObjective(critic.value_clip),
        layout=role_layouts(recipe)[CRITIC],
        recompute=critic.recompute,
        recompute_num_layers=critic.recompute_num_layers,
        offload=critic.offload,
        head="score",
    )


def _of_section(actor: RoleSpec, role: str, recipe: Recipe, section: RewardModel | Teacher, folder: Path) -> RoleSpec:
    return replace(_frozen(actor, role, recipe), folder=folder.resolve(), offload=section.offload)


def _frozen(actor: RoleSpec, role: str, recipe: AnyRecipe) -> RoleSpec:
    """A model that stands still, with the actor's dtype and temperature, at a layout of its own."""
    return RoleSpec(actor.folder, actor.dtype, actor.temperature, layout=role_layouts(recipe)[role])
