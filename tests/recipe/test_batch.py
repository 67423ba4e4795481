from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.errors import UserError
from megarl.recipe.batch import BatchPlan, nearest_divisors, plan_batches
from megarl.recipe.load import load_recipe
from megarl.recipe.roles import Parallel
from megarl.recipe.schema import Recipe
from megarl.recipe.supervised import RmRecipe, SftRecipe


def make(**changes: int | None) -> Recipe:
    keys: dict[str, int | None] = {
        "prompts": 8,
        "samples": 4,
        "mini": None,
        "micro": 2048,
        "devices": 1,
        "tp": 1,
        "pp": 1,
    }
    keys |= {"warmup": 0, "epochs": 1} | changes
    return Recipe.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t", "max_prompt_tokens": 100},
            "cluster": {"devices": keys["devices"]},
            "rollout": {
                "prompts_per_step": keys["prompts"],
                "samples_per_prompt": keys["samples"],
                "max_response_tokens": 28,
            },
            "actor": {
                "mini_batch_samples": keys["mini"],
                "micro_batch_tokens": keys["micro"],
                "parallel": {"tp": keys["tp"], "pp": keys["pp"]},
                "epochs": keys["epochs"],
                "optimizer": {"warmup_steps": keys["warmup"]},
            },
            "train": {"steps": 5},
        }
    )


def test_arithmetic_of_a_whole_run() -> None:
    plan = plan_batches(make(mini=8, devices=8, tp=2, epochs=2))
    assert (plan.samples, plan.mini_batches, plan.dp, plan.longest) == (32, 4, 4, 128)
    assert (plan.updates_per_step, plan.optimizer_steps) == (8, 40)
    assert plan.describe() == (
        "each step: 8 prompts x 4 samples = 32 samples -> 4 mini-batches of 8, 2 times -> micro-batches of at most "
        "2,048 tokens on 8 devices (dp 4 x tp 2); 5 steps, 40 optimizer steps"
    )


def test_without_mini_batches_a_step_is_one(sft_file: Path) -> None:
    plan = plan_batches(make())
    assert (plan.mini_batch_samples, plan.mini_batches, plan.optimizer_steps) == (32, 1, 5)
    plan = plan_batches(load_recipe(sft_file, [], SftRecipe).recipe)
    assert plan.rows == "demonstration"
    assert (plan.samples, plan.mini_batches, plan.optimizer_steps) == (16, 1, 10)
    assert plan.describe().startswith("each step: 16 demonstrations -> 1 mini-batch of 16 -> micro-batches")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"mini": 10},
            "actor.mini_batch_samples 10 does not divide rollout.prompts_per_step 8 x "
            "rollout.samples_per_prompt 4 = 32 samples. Nearest valid value: 8 or 16.",
        ),
        ({"mini": 64}, "actor.mini_batch_samples 64 does not divide"),
        ({"mini": 64}, "Nearest valid value: 32."),
        (
            {"mini": 2, "devices": 4},
            "actor.mini_batch_samples 2 is less than one sample for each of 4 data-parallel ranks",
        ),
        ({"mini": 2, "devices": 4}, "Nearest valid value: 4 or 8."),
        ({"mini": 3, "devices": 4}, "Nearest valid value: 4 or 8."),
        (
            {"devices": 64, "prompts": 8},
            "less than one sample for each of 64 data-parallel ranks. Set rollout.prompts_per_step to at least 16.",
        ),
        (
            {"devices": 8, "tp": 3},
            "A copy of the actor takes 3 devices (actor.parallel tp 3), which do not divide cluster.devices 8. "
            "Nearest valid size of a copy: 2 or 4; nearest valid number of devices: 6 or 9.",
        ),
        ({"devices": 2, "tp": 2, "pp": 2}, "takes 4 devices (actor.parallel tp 2 x pp 2)"),
        ({"devices": 1, "tp": 2}, "Nearest valid size of a copy: 1; nearest valid number of devices: 2."),
        ({"micro": 100}, "actor.micro_batch_tokens 100 does not hold the longest sample, 128 tokens"),
        ({"micro": 100}, "Nearest valid value: 128."),
        ({"warmup": 5}, "the actor makes 5 optimizer steps. Set it to at most 4."),
    ],
)
def test_impossible_sizes_give_the_nearest_valid_value(changes: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        plan_batches(make(**changes))


def with_pools(actor: int, reference: int, **changes: int | None) -> Recipe:
    pools = {
        "a": {"devices": actor, "roles": ["actor"]},
        "r": {"devices": reference, "roles": ["reference"]},
    }
    values = make(devices=actor + reference, **changes).model_dump(exclude_unset=True)
    values |= {"placement": {"pools": pools}, "reference": {"parallel": {}}}
    values["algorithm"] = {"kl_coef": 0.1}
    return Recipe.model_validate(values)


def test_the_actor_has_the_devices_of_its_pool_and_not_those_of_all() -> None:
    plan = plan_batches(with_pools(8, 1, tp=4))
    assert (plan.devices, plan.dp, plan.copy_size) == (8, 2, 4)
    assert "on 8 devices (dp 2 x tp 4)" in plan.describe()
    with pytest.raises(UserError, match=r"takes 4 devices.*do not divide placement.pools.a.devices 6"):
        plan_batches(with_pools(6, 2, tp=4))


def test_ranks_of_several_pools_have_to_share_out_a_mini_batch() -> None:
    with pytest.raises(UserError, match=r"each of 12 data-parallel ranks \(the least common multiple of all roles'\)"):
        plan_batches(with_pools(4, 3, mini=8))


def test_several_problems_are_told_together() -> None:
    with pytest.raises(UserError) as caught:
        plan_batches(make(mini=10, micro=1, devices=3, tp=2))
    assert str(caught.value).count("\n  - ") == 3


def test_supervised_batch_smaller_than_the_ranks(sft_file: Path) -> None:
    recipe = load_recipe(sft_file, ["cluster.devices=32", "actor.micro_batch_tokens=5"], SftRecipe).recipe
    with pytest.raises(UserError, match=r"batch_samples 16 is less than one.* 32 data-parallel ranks") as caught:
        plan_batches(recipe)
    assert "(data.max_tokens)" in str(caught.value)


def test_a_micro_batch_holds_a_whole_pair(rm_file: Path) -> None:
    plan = plan_batches(load_recipe(rm_file, ["data.max_tokens=64", "actor.micro_batch_tokens=128"], RmRecipe).recipe)
    assert plan.describe().startswith(
        "each step: 16 pairs -> 1 mini-batch of 16 -> micro-batches of at most 128 tokens"
    )
    with pytest.raises(UserError) as caught:
        plan_batches(load_recipe(rm_file, ["data.max_tokens=65", "actor.micro_batch_tokens=128"], RmRecipe).recipe)
    assert "does not hold the longest pair, 130 tokens (twice data.max_tokens)" in str(caught.value)
    assert "Nearest valid value: 130." in str(caught.value)


@given(st.integers(1, 500), st.integers(1, 600), st.integers(1, 40))
def test_nearest_divisors_are_the_nearest(number: int, wanted: int, at_least: int) -> None:
    found = nearest_divisors(number, wanted, at_least)
    valid = [size for size in range(at_least, number + 1) if number % size == 0]
    assert set(found) <= set(valid)
    assert bool(found) == bool(valid)
    if valid:
        assert min(abs(size - wanted) for size in valid) == min(abs(size - wanted) for size in found)


@given(st.integers(1, 64), st.integers(2, 16), st.integers(1, 2048), st.integers(1, 8), st.integers(1, 8))
def test_a_plan_is_possible_or_refused_with_values_that_work(
    prompts: int, samples: int, mini: int, devices: int, tp: int
) -> None:
    recipe = make(prompts=prompts, samples=samples, mini=mini, devices=devices, tp=tp)
    try:
        plan = plan_batches(recipe)
    except UserError as error:
        advice = re.search(r"mini_batch_samples .*Nearest valid value: (\d+)", str(error))
        if advice and devices % tp == 0:
            assert plan_batches(make(prompts=prompts, samples=samples, mini=int(advice[1]), devices=devices, tp=tp))
        return
    assert plan.mini_batches * plan.mini_batch_samples == prompts * samples
    assert plan.dp * tp == devices
    assert plan.mini_batch_samples >= plan.dp


def test_plan_is_a_plain_record() -> None:
    assert BatchPlan(1, 2, 2, 8, 4, 1, Parallel(), 1, 3, 1).optimizer_steps == 3


def test_a_critics_warm_up_is_its_own_and_the_actor_stands_still_meanwhile(recipe_file: Path) -> None:
    given = ["algorithm.advantage=gae", "critic.warmup_steps=4", "critic.epochs=3", "actor.mini_batch_samples=16"]
    plan = plan_batches(load_recipe(recipe_file, given).recipe)
    # 10 steps of 2 mini-batches: the actor's schedule ends with its last step, and the critic's with the critic's.
    assert (plan.optimizer_steps, plan.critic_steps) == (6 * 2, 10 * 2 * 3)
    plan_batches(load_recipe(recipe_file, [*given, "critic.optimizer.warmup_steps=59"]).recipe)
    with pytest.raises(UserError, match=r"critic\.optimizer\.warmup_steps 60 .*the critic makes 60 .* at most 59"):
        plan_batches(load_recipe(recipe_file, [*given, "critic.optimizer.warmup_steps=60"]).recipe)
    share = load_recipe(recipe_file, [*given, "critic.optimizer.warmup_share=0.98"]).recipe
    plan_batches(share)
    assert share.critic is not None and share.critic.optimizer.warmup_of(60) == 59
    with pytest.raises(UserError, match=r"critic\.optimizer\.warmup_share 0\.99 leaves nothing .* at most 0\."):
        plan_batches(load_recipe(recipe_file, [*given, "critic.optimizer.warmup_share=0.99"]).recipe)
