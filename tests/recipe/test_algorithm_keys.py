"""All combinations of the named functions: each key that is accepted changes what is learned, each role that is there is heard.

The step's own functions on a few samples: packing, advantages of two steps, losses forward and backward. `test_keys.py`
goes through whole runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from megarl.algorithms.inputs import LOSS_INPUTS, SAMPLE_INPUTS, TOKEN_INPUTS, wanted
from megarl.algorithms.policy_loss import POLICY_LOSSES
from megarl.algorithms.reduce import Reduction
from megarl.core.types import Block, Column, Sample, Shard, ShardPlan
from megarl.data.pack import assemble, join_columns, pack_samples, split_column
from megarl.recipe.algorithm import Algorithm, PolicyLoss, SampleAdvantage, TokenAdvantage
from megarl.recipe.check import check_recipe, fill_defaults
from megarl.recipe.functions import ADVANTAGES
from megarl.recipe.layouts import role_layouts
from megarl.recipe.schema import Recipe
from megarl.recipe.scoring import asked_of_teacher
from megarl.rollout import filters
from megarl.rollout.local_advantages import READ, LocalAdvantages, SampleNumbers
from megarl.rollout.step_advantages import StepAdvantages, StepFacts
from megarl.training.spec import PolicyObjective, ValueObjective
from tests.rollout.samples import group_index, make_prompt
from tests.support.dry.learning import column_of, learn, rounded, top_of

MOST = 8
LENGTHS = (3, 8, 5, 2, 7, 4, 8, 1, 6)
REWARDS = (1.0, 0.0, 0.25, 0.5, 1.0, 0.0, 0.2, 0.2, 0.2)  # the last group is all wrong, and equally so
GREEDY = np.array([0.5, 0.25, 0.75], np.float32)
# The column that each role makes, and who reads it.
COLUMNS = {
    "actor": "old_logprobs",
    "reference": "ref_logprobs",
    "critic": "values",
    "reward_model": "scores",
    "teacher": "teacher_logprobs",
}
BASE = {
    "model": {"path": Path("m")},
    "data": {"train": Path("t")},
    "rollout": {"prompts_per_step": 3, "samples_per_prompt": 3, "max_response_tokens": MOST},
    "train": {"steps": 10},
}
STEERED = {"kl_coef": 0.1, "kl_in": "reward", "kl_control": {"target": 0.1, "horizon": 20}}
# What stands beside the two functions.
BESIDE: tuple[dict[str, Any], ...] = (
    {},
    {"kl_coef": 0.1, "correction": {"kind": "mask"}, "entropy_coef": 0.01},
    {
        **STEERED,
        "correction": {"kind": "reject", "level": "geometric", "low": 0.85, "high": 1.2},
        "reduction": "constant",
    },
)
# One other value for each key of the section, and the roles' sections; names of functions come on top.
OTHERS: tuple[dict[str, Any], ...] = (
    {"normalize_std": False},
    {"gamma": 0.5},
    {"lam": 0.5},
    {"whiten": False},
    {"whiten": True},
    {"advantage_clip": 0.3},
    {"overlong_buffer": 0.9},
    {"clip_low": 0.05},
    {"clip_high": 0.05},
    {"dual_clip": 1.1},
    {"distill_top_k": 3},
    *({"distill_beta": beta} for beta in (0.0, 0.5)),
    {"distill_forward_weight": 0.5},
    {"settings": {"eps": 1.0}},
    {"kl_coef": 0.3},
    *({"kl_kind": kind} for kind in ("k1", "k2", "abs")),
    *({"kl_in": place} for place in ("loss", "reward")),
    {"kl_control": {"target": 50.0}},
    {"entropy_coef": 0.1},
    *({"reduction": name} for name in ("token-mean", "sequence-mean", "group-mean", "constant")),
    {"old_logprobs": "rollout"},
    *(
        {"correction": {"kind": kind, "level": level}}
        for kind in ("truncate", "mask", "reject")
        for level in ("token", "sequence", "geometric")
    ),
    {"correction": {"kind": "truncate", "low": 0.9}},
    {"correction": {"kind": "mask", "low": 0.9}},
    *({"correction": {"reject": {"level": level}}} for level in ("token", "sequence", "geometric")),
    {"critic": {}},
    {"critic": {"value_clip": 0.01}},
    {"teacher": {"path": Path("t")}},
    {"reward_model": {"path": Path("r"), "level": "sequence"}},
    {"reward_model": {"path": Path("r"), "level": "token"}},
)
# What is decided before samples are packed, or by files: whole runs go through it.
DROPPED = {"drop_zero_variance_groups", "keep_groups", "refill_rounds"}
ELSEWHERE = {"preset", "truncated", *DROPPED, "max_logprob_diff", "on_logprob_diff"}
SECTIONS = ("critic", "teacher", "reward_model")


def test_every_key_of_the_section_is_tried() -> None:
    tried = {key for other in OTHERS for key in other} - set(SECTIONS)
    assert tried | ELSEWHERE | {"advantage", "policy_loss"} == set(Algorithm.model_fields)


def test_the_names_of_a_recipe_are_those_of_the_functions() -> None:
    assert set(ADVANTAGES) == {*get_args(SampleAdvantage), *get_args(TokenAdvantage)}
    assert set(POLICY_LOSSES) == set(get_args(PolicyLoss))
    assert POLICY_LOSSES["gpg"] is POLICY_LOSSES["reinforce"]  # so only one of them is gone through below


def accepted(given: Mapping[str, Any]) -> Recipe | list[str]:
    """The recipe with these keys of the section `algorithm`, and roles' sections; or what stands against it."""
    sections = {name: given[name] for name in SECTIONS if name in given}
    algorithm = {name: value for name, value in given.items() if name not in SECTIONS}
    recipe = Recipe.model_validate({**BASE, **sections, "algorithm": algorithm})
    problems = check_recipe(recipe, dict.fromkeys(leaves({**sections, "algorithm": algorithm}), "here"))
    return problems or fill_defaults(recipe)


def leaves(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Dotted paths of the values."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value and name != "settings":
            yield from leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def samples() -> list[Sample]:
    found = []
    for index, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        tokens = np.arange(length) * 3 + index
        found.append(
            Sample(
                id=str(index),
                group_id=str(index // 3),
                prompt=make_prompt(f"p{index // 3}"),
                response_ids=tokens,
                response_text="",
                loss_mask=np.ones(length, np.uint8),
                rollout_logprobs=(-1.5 + np.sin(tokens)).astype(np.float32),
                versions=(),
                status=None,  # type: ignore[arg-type]
                reward=reward,
            )
        )
    return found


SAMPLES = samples()


@cache
def packed(reduction: Reduction) -> tuple[ShardPlan, Block, Shard]:
    """The samples as one shard."""
    [(plan, block)] = pack_samples(
        SAMPLES,
        num_shards=1,
        mini_batch_samples=len(SAMPLES),
        micro_batch_tokens=1000,
        reduction=reduction,
        max_response_tokens=MOST,
    )
    return plan, block, assemble(plan, [block])


def learned(recipe: Recipe, louder: str = "") -> dict[str, Any]:
    """What two steps come to. louder: a role whose column is another one."""
    algorithm = recipe.algorithm
    plan, block, shard = packed(algorithm.reduction)
    said = {
        COLUMNS[role]: says(role, algorithm.reduction, 1.3 if role == louder else 1.0) for role in role_layouts(recipe)
    }
    if recipe.teacher is not None and asked_of_teacher(recipe)[1]:
        louder_by = 1.3 if louder == "teacher" else 1.0
        said["teacher_top"] = top_of("teacher", shard, algorithm.distill_top_k, louder_by)
    if algorithm.old_logprobs == "rollout":
        del said["old_logprobs"]
    local, whole = LocalAdvantages(recipe), StepAdvantages(recipe)
    flat = {name: split_column(column, [plan], [[block]])[0] for name, column in said.items() if name in READ}
    for _ in range(2):
        measured = local.measure(numbers(whole.kl_coef), [block], flat)
        [settled] = whole.settle(FACTS, [measured])
        learnable = local.finish(settled)
    columns = said | {name: join_columns(plan, [block], column) for name, column in learnable.columns.items()}
    found = {name: rounded(value) for name, value in whole.metrics([measured], [learnable.sums]).items()}
    found |= learn(PolicyObjective(algorithm), shard, columns)
    if recipe.critic is not None:
        values = learn(ValueObjective(recipe.critic.value_clip), shard, columns, role="later critic")
        found |= {f"critic: {name}": value for name, value in values.items()}
    return found


FACTS = StepFacts(
    1,
    filters.rewards(SAMPLES),
    group_index(SAMPLES),
    np.array([len(sample.response_ids) for sample in SAMPLES], np.int64),
    np.array([sample.loss_mask.sum() for sample in SAMPLES], np.int64),
    filters.mean_nll(SAMPLES),
    np.arange(len(SAMPLES)) == 3,
    np.array([REWARDS], np.float64).T,
    GREEDY,
)


def numbers(kl_coef: float) -> SampleNumbers:
    of_samples = (FACTS.rewards, FACTS.group_index, FACTS.response_tokens, FACTS.mean_nll)
    return SampleNumbers(*of_samples, FACTS.truncated, FACTS.reward_parts, kl_coef, GREEDY)


@cache
def says(role: str, reduction: Reduction, scale: float) -> Column:
    """The column that a role makes of the shard."""
    return column_of(role, packed(reduction)[2], scale)


def with_teacher(given: dict[str, Any]) -> dict[str, Any]:
    """With the teacher that the functions ask for."""
    loss, advantage = POLICY_LOSSES[given["policy_loss"]], ADVANTAGES[given.get("advantage", "grpo")]
    asks = wanted(loss, LOSS_INPUTS) | wanted(advantage, {**SAMPLE_INPUTS, **TOKEN_INPUTS})
    return given | ({"teacher": {"path": Path("t")}} if asks & {"teacher_logprobs", "teacher_top_logprobs"} else {})


LOSSES = [name for name in POLICY_LOSSES if name != "gpg"]
PAIRS = [(advantage, loss) for loss in LOSSES for advantage in (*ADVANTAGES, None)]


class Learned:
    """What is accepted, and what it comes to, remembered: many recipes differ in one key from several others."""

    def __init__(self) -> None:
        self._accepted: dict[str, Recipe | list[str]] = {}
        self._known: dict[str, dict[str, Any]] = {}

    def accepted(self, given: Mapping[str, Any]) -> Recipe | list[str]:
        """As the function of this name says."""
        key = json.dumps(given, sort_keys=True, default=str)
        if key not in self._accepted:
            self._accepted[key] = accepted(given)
        return self._accepted[key]

    def of(self, recipe: Recipe) -> dict[str, Any]:
        key = recipe.model_dump_json(include={"algorithm", *SECTIONS})
        if key not in self._known:
            self._known[key] = learned(recipe)
        return self._known[key]


@pytest.fixture(scope="module")
def memory() -> Learned:
    return Learned()


@pytest.mark.parametrize(("advantage", "loss"), PAIRS)
def test_every_accepted_key_changes_what_is_learned(memory: Learned, advantage: str | None, loss: str) -> None:
    dead = []
    for beside in BESIDE:
        given = with_teacher({"policy_loss": loss, **({"advantage": advantage} if advantage else {}), **beside})
        recipe = memory.accepted(given)
        if not isinstance(recipe, Recipe):
            continue  # each key of it is given to others, one by one
        before, said = memory.of(recipe), sections_of(recipe)
        names: Sequence[dict[str, Any]] = [
            *({"advantage": name} for name in ADVANTAGES),
            *({"policy_loss": name} for name in LOSSES),
        ]
        for other in (*OTHERS, *names):
            if says_the_same(other, said):
                continue
            after = memory.accepted({**given, **other})
            if not isinstance(after, Recipe) or are_twins(after, recipe):
                continue
            if memory.of(after) == before:
                dead.append(f"{other} beside {given}")
    assert dead == []


def are_twins(one: Recipe, other: Recipe) -> bool:
    """GRPO by turns is GRPO, for these samples have one each. So is GPG where the rewards of every group differ: here, wherever
    the KL of each token comes off them.
    """
    pair = {one.algorithm.advantage, other.algorithm.advantage}
    alike = {"grpo", "grpo_turns"} | ({"gpg"} if one.algorithm.kl_in == "reward" else set())
    return len(pair) == 2 and pair <= alike


def sections_of(recipe: Recipe) -> dict[str, Any]:
    """The values of the section `algorithm`, and the roles' sections."""
    whole = recipe.model_dump(include={"algorithm", *SECTIONS})
    return {**whole["algorithm"], **{name: whole[name] for name in SECTIONS}}


def says_the_same(other: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether the sections have these values already."""
    return all(_within(value, found[name]) for name, value in other.items())


def _within(value: Any, found: Any) -> bool:
    if isinstance(value, Mapping) and isinstance(found, Mapping):
        return all(name in found and _within(each, found[name]) for name, each in value.items())
    return bool(value == found)


@pytest.mark.parametrize(("advantage", "loss"), PAIRS)
def test_no_role_is_loaded_that_nobody_hears(memory: Learned, advantage: str | None, loss: str) -> None:
    for beside in BESIDE:
        for role in ({}, {"reward_model": {"path": Path("r")}}):
            given = {"policy_loss": loss, **({"advantage": advantage} if advantage else {}), **beside, **role}
            recipe = memory.accepted(with_teacher(given))
            if isinstance(recipe, Recipe):
                plain = memory.of(recipe)
                for name in role_layouts(recipe):
                    assert learned(recipe, louder=name) != plain, f"{name} in {given}"
