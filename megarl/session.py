"""Puts a run's processes together and takes them apart: what stands between a checked recipe and the loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megarl.cluster.feeder import SftFeeder
from megarl.cluster.ranks import RankGroup
from megarl.cluster.roles import Policy, Reference
from megarl.cluster.rollout import RolloutPool
from megarl.cluster.runtime import Runtime
from megarl.cluster.servers import LaunchingPool, ServerPool
from megarl.cluster.waits import Waiter
from megarl.cluster.weight_sync import WeightSync
from megarl.core.timing import PhaseTimer
from megarl.preflight import Preflight
from megarl.recipe.layouts import num_shards, role_layouts
from megarl.recipe.rules import longest_sample
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.recipe.supervised import SftRecipe
from megarl.rollout.server import ServerSpec
from megarl.training.spec import PolicyObjective, RoleSpec, SftObjective

ACTOR, REFERENCE = "actor", "reference"
ROUTING_FLAGS = ("--enable-return-routed-experts",)


@dataclass(frozen=True)
class TrainSession:
    """Everybody in a reinforcement-learning run, ready."""

    actor: Policy
    reference: Reference | None
    rollout: RolloutPool
    sync: WeightSync


@dataclass(frozen=True)
class SftSession:
    """Everybody in a supervised run, ready."""

    model: Policy
    feeder: SftFeeder


def _start_ranks(runtime: Runtime, recipe: AnyRecipe, waiter: Waiter) -> RankGroup:
    deadlines = recipe.deadlines
    longest = max(deadlines.start_s, deadlines.train_s, deadlines.save_s)
    return RankGroup.start(runtime, recipe.cluster.devices, recipe.run.seed, waiter, deadlines.start_s, longest)


def _actor_spec(recipe: AnyRecipe, checked: Preflight) -> RoleSpec:
    return RoleSpec(
        recipe.model.path.resolve(),
        recipe.model.dtype,
        recipe.rollout.temperature if isinstance(recipe, Recipe) else 1.0,
        optimizer=recipe.actor.optimizer,
        total_steps=checked.plan.optimizer_steps,
        objective=PolicyObjective(recipe.algorithm) if isinstance(recipe, Recipe) else SftObjective(),
        layout=role_layouts(recipe)["actor"],
        recompute=recipe.actor.recompute,
        aux_loss_coef=recipe.actor.aux_loss_coef,
        lora=recipe.actor.lora,
        resting=recipe.actor.resting,
        routing_replay=isinstance(recipe, Recipe) and recipe.actor.routing_replay,
    )


def _reference_spec(recipe: Recipe, actor: RoleSpec) -> RoleSpec:
    """A model of its own; under LoRA the actor's, without its adapters."""
    return RoleSpec(
        actor.folder,
        actor.dtype,
        actor.temperature,
        layout=role_layouts(recipe)["reference"],
        base_of=ACTOR if recipe.actor.lora else None,
        resting=recipe.reference.resting,
    )


def _launch_servers(runtime: Runtime, recipe: Recipe, waiter: Waiter) -> LaunchingPool:
    settings = recipe.rollout
    spec = ServerSpec(
        model=recipe.model.path.resolve(),
        dtype=recipe.model.dtype,
        tp=settings.tp,
        max_running_requests=settings.max_running_requests,
        kv_tokens=settings.kv_tokens,
        context_length=longest_sample(recipe),
        seed=recipe.run.seed,
        extra=(*settings.server_args, *(ROUTING_FLAGS if recipe.actor.routing_replay else ())),
    )
    deadlines = recipe.deadlines
    return ServerPool.launch(runtime, spec, settings.servers, deadlines.rollout_s, waiter, deadlines.start_s)


@contextmanager
def train_session(recipe: Recipe, checked: Preflight, timer: PhaseTimer) -> Iterator[TrainSession]:
    """Start servers and ranks side by side; on leaving, end everything."""
    waiter, layouts = Waiter(timer), role_layouts(recipe)
    with Runtime.start(checked.platform, recipe.run.folder, recipe.cluster.devices) as runtime:
        launching = _launch_servers(runtime, recipe, waiter)
        ranks = _start_ranks(runtime, recipe, waiter)
        actor = Policy(ACTOR, ranks, layouts["actor"], recipe.deadlines)
        spec = _actor_spec(recipe, checked)
        actor.build(spec)
        reference = None
        if "reference" in layouts:
            reference = Reference(REFERENCE, ranks, layouts["reference"], recipe.deadlines)
            reference.build(_reference_spec(recipe, spec))
        rollout = RolloutPool.start(runtime, recipe, launching.ready(), num_shards(recipe), waiter)
        yield TrainSession(actor, reference, rollout, WeightSync(ACTOR, ranks, layouts["actor"], rollout, recipe))
        rollout.close()


@contextmanager
def eval_session(recipe: Recipe, checked: Preflight, timer: PhaseTimer, folder: Path) -> Iterator[RolloutPool]:
    """Servers and collector only; on leaving, end everything. folder: where logs go."""
    waiter = Waiter(timer)
    with Runtime.start(checked.platform, folder, 1) as runtime:
        rollout = RolloutPool.start(runtime, recipe, _launch_servers(runtime, recipe, waiter).ready(), 1, waiter)
        yield rollout
        rollout.close()


@contextmanager
def sft_session(recipe: SftRecipe, checked: Preflight, timer: PhaseTimer) -> Iterator[SftSession]:
    """Start the ranks and the feeder; on leaving, end everything."""
    waiter = Waiter(timer)
    with Runtime.start(checked.platform, recipe.run.folder, recipe.cluster.devices) as runtime:
        ranks = _start_ranks(runtime, recipe, waiter)
        model = Policy(ACTOR, ranks, role_layouts(recipe)["actor"], recipe.deadlines)
        model.build(_actor_spec(recipe, checked))
        yield SftSession(model, SftFeeder.start(runtime, recipe, num_shards(recipe), waiter))
