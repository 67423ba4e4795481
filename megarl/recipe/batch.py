"""All batch arithmetic of a run, in one place: from prompts per step to micro-batches and optimizer steps.

prompts per step x samples per prompt = N samples -> M mini-batches of K -> micro-batches of at most T tokens
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from megarl.core.errors import UserError
from megarl.recipe.layouts import SHARED, num_shards, pools_of
from megarl.recipe.roles import Optimizer, Parallel
from megarl.recipe.rollout_rules import longest_sample
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.recipe.supervised import PairData, SftData, UnpairedData

Row = Literal["demonstration", "pair", "labelled answer"]
_ROWS: Mapping[type, Row] = MappingProxyType(
    {PairData: "pair", UnpairedData: "labelled answer", SftData: "demonstration"}
)


@dataclass(frozen=True)
class BatchPlan:
    """What one step is made of. Counts are of the whole run's pool; dropped zero-variance groups make a step smaller.

    prompts: groups in one step (supervised: rows). mini_batch_samples: samples of one optimizer step.
    longest: most tokens of what a micro-batch has to hold whole. devices: of the actor's pool, given by the key `given_by`.
    parallel: the actor's. shards: that a step is assigned in. steps: 0 where the recipe has epochs, and no rows are counted yet.
    epochs: times that a step's samples are gone through. still: first steps in which the actor stands still.
    critic_epochs: times that a critic goes through them. rows: what a supervised run's rows are, in the singular.
    """

    prompts: int
    samples_per_prompt: int
    mini_batch_samples: int
    micro_batch_tokens: int
    longest: int
    devices: int
    parallel: Parallel
    shards: int
    steps: int
    epochs: int
    still: int = 0
    critic_epochs: int = 1
    rows: Row | None = None
    given_by: str = "cluster.devices"

    @property
    def samples(self) -> int:
        """N: samples of one step."""
        return self.prompts * self.samples_per_prompt

    @property
    def mini_batches(self) -> int:
        """M: mini-batches that a step's samples are cut into."""
        return self.samples // self.mini_batch_samples

    @property
    def dp(self) -> int:
        """Data-parallel ranks of the actor: what its other axes leave of the devices."""
        return self.devices // self.copy_size

    @property
    def copy_size(self) -> int:
        """Devices that hold one copy of the actor."""
        return self.parallel.tp * self.parallel.pp * self.parallel.cp

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in one step."""
        return self.mini_batches * self.epochs

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run, at most."""
        return (self.steps - self.still) * self.updates_per_step

    @property
    def critic_steps(self) -> int:
        """Optimizer steps of a critic, at most."""
        return self.steps * self.mini_batches * self.critic_epochs

    def describe(self) -> str:
        """The arithmetic in one line."""
        if self.rows is not None:
            step = f"{self.samples} {self.rows}s"
        else:
            step = f"{self.prompts} prompts x {self.samples_per_prompt} samples = {self.samples} samples"
        epochs = f", {self.epochs} times" if self.epochs > 1 else ""
        known = f"{self.steps} steps, {self.optimizer_steps} optimizer steps"
        length = known if self.steps else "steps: as train.epochs says"
        return (
            f"each step: {step} -> {_count(self.mini_batches, 'mini-batch', 'mini-batches')} of "
            f"{self.mini_batch_samples}{epochs} -> micro-batches of at most {self.micro_batch_tokens:,} tokens "
            f"on {_count(self.devices, 'device', 'devices')} (dp {self.dp} x {_axes(self.parallel)}); {length}"
        )


def plan_batches(recipe: AnyRecipe) -> BatchPlan:
    """The batch arithmetic of a recipe. Raises UserError: what does not add up, with the nearest values that do."""
    parallel = recipe.actor.parallel
    devices, given_by = _actors_devices(recipe)
    fits = devices % (parallel.tp * parallel.pp * parallel.cp) == 0
    layout = (devices, parallel, num_shards(recipe) if fits else 1, recipe.train.steps)
    if isinstance(recipe, Recipe):
        samples = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
        plan = BatchPlan(
            recipe.rollout.prompts_per_step,
            recipe.rollout.samples_per_prompt,
            recipe.actor.mini_batch_samples or samples,
            recipe.actor.micro_batch_tokens,
            longest_sample(recipe),
            *layout,
            epochs=recipe.actor.epochs,
            still=recipe.critic.warmup_steps if recipe.critic is not None else 0,
            critic_epochs=recipe.critic.epochs if recipe.critic is not None else 1,
            given_by=given_by,
        )
    else:
        count, data = recipe.train.batch_samples, recipe.data
        longest = data.max_tokens * (2 if isinstance(data, PairData) else 1)
        plan = BatchPlan(
            count,
            1,
            count,
            recipe.actor.micro_batch_tokens,
            longest,
            *layout,
            epochs=1,
            rows=_ROWS[type(data)],
        )
    problems = _problems(plan) or _warmup_problems(recipe, plan)
    if len(problems) == 1:
        raise UserError(f"The batch sizes do not add up. {problems[0]}")
    if problems:
        raise UserError("The batch sizes do not add up." + "".join(f"\n  - {problem}" for problem in problems))
    return plan


def _actors_devices(recipe: AnyRecipe) -> tuple[int, str]:
    """Devices of the actor's pool, and the key that says how many. Raises UserError for pools that do not fit the run."""
    [(name, pool)] = [(name, pool) for name, pool in pools_of(recipe).items() if "actor" in pool.roles]
    return pool.devices, "cluster.devices" if name == SHARED else f"placement.pools.{name}.devices"


def _warmup_problems(recipe: AnyRecipe, plan: BatchPlan) -> list[str]:
    learning = {"actor": (recipe.actor.optimizer, plan.optimizer_steps)}
    if isinstance(recipe, Recipe) and recipe.critic is not None:
        learning["critic"] = recipe.critic.optimizer, plan.critic_steps
    return [
        f"{role}.optimizer.{_warmup_key(optimizer)} leaves nothing after warm-up: "
        f"the {role} makes {steps} optimizer steps. Set it to at most {steps - 1 if optimizer.warmup_steps else 0}."
        for role, (optimizer, steps) in learning.items()
        if plan.steps and optimizer.warmup_of(steps) >= steps
    ]


def _warmup_key(optimizer: Optimizer) -> str:
    steps = optimizer.warmup_steps
    return f"warmup_steps {steps}" if steps else f"warmup_share {optimizer.warmup_share:g}"


def uneven_mini_batch(prompts: int, samples_per_prompt: int, size: int, shards: int = 1) -> str | None:
    """What is wrong with mini-batches that do not divide a step's samples; None where they do. shards: each has a sample."""
    samples = prompts * samples_per_prompt
    if samples % size == 0:
        return None
    valid = _either(nearest_divisors(samples, max(size, shards), at_least=shards))
    return (
        f"actor.mini_batch_samples {size} does not divide rollout.prompts_per_step {prompts} x rollout.samples_per_prompt "
        f"{samples_per_prompt} = {samples} samples. Nearest valid value: {valid}."
    )


def nearest_divisors(number: int, wanted: int, at_least: int = 1) -> list[int]:
    """The divisors of `number`, not under `at_least`, that stand nearest to `wanted`: one below, one above."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    divisors = sorted(size for size in {*small, *(number // size for size in small)} if size >= at_least)
    below = [size for size in divisors if size <= wanted][-1:]
    above = [size for size in divisors if size > wanted][:1]
    return below + above


def _problems(plan: BatchPlan) -> list[str]:
    problems = []
    size = plan.copy_size
    if plan.devices % size:
        problems.append(
            f"A copy of the actor takes {size} devices (actor.parallel {_axes(plan.parallel)}), which do not divide "
            f"{plan.given_by} {plan.devices}. Nearest valid size of a copy: "
            f"{_either(nearest_divisors(plan.devices, size))}; "
            f"nearest valid number of devices: {_either(_multiples(size, plan.devices))}."
        )
    dp = max(1, plan.shards)
    if plan.rows is not None:
        if plan.samples < dp:
            problems.append(
                f"train.batch_samples {plan.samples} is less than one {plan.rows} for each of {dp} "
                f"data-parallel ranks. Set it to at least {dp}."
            )
    else:
        problems += _mini_batch_problems(plan, dp)
    if plan.micro_batch_tokens < plan.longest:
        whole = {
            "demonstration": "sample, {} tokens (data.max_tokens), and a sample is",
            "labelled answer": "labelled answer, {} tokens (data.max_tokens), and an answer is",
            "pair": "pair, {} tokens (twice data.max_tokens), and a pair is",
            None: "sample, {} tokens (data.max_prompt_tokens + rollout.max_response_tokens), and a sample is",
        }[plan.rows].format(plan.longest)
        problems.append(
            f"actor.micro_batch_tokens {plan.micro_batch_tokens} does not hold the longest {whole} never cut. "
            f"Nearest valid value: {plan.longest}."
        )
    return problems


def _mini_batch_problems(plan: BatchPlan, dp: int) -> list[str]:
    size, samples = plan.mini_batch_samples, plan.samples
    product = (
        f"rollout.prompts_per_step {plan.prompts} x rollout.samples_per_prompt {plan.samples_per_prompt} "
        f"= {samples} samples"
    )
    if samples < dp:
        return [
            f"{product} is less than one sample for each of {dp} data-parallel ranks. "
            f"Set rollout.prompts_per_step to at least {-(-dp // plan.samples_per_prompt)}."
        ]
    if uneven := uneven_mini_batch(plan.prompts, plan.samples_per_prompt, size, dp):
        return [uneven]
    if size < dp:
        valid = _either(nearest_divisors(samples, dp, at_least=dp))
        whose = (
            f"{plan.given_by} {plan.devices} / actor.parallel {_axes(plan.parallel)}"
            if dp == plan.dp
            else "the least common multiple of all roles'"
        )
        return [
            f"actor.mini_batch_samples {size} is less than one sample for each of {dp} data-parallel ranks ({whose}). "
            f"Nearest valid value: {valid}."
        ]
    return []


def _axes(parallel: Parallel) -> str:
    """The axes that one copy of the model is cut along: `tp 2 x pp 2`."""
    sizes = {"tp": parallel.tp, "pp": parallel.pp, "cp": parallel.cp}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "tp 1"


def _multiples(number: int, wanted: int) -> list[int]:
    below = wanted // number * number
    return [count for count in (below, below + number) if count > 0]


def _either(values: list[int]) -> str:
    return " or ".join(map(str, values))


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
