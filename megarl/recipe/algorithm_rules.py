"""The rules about what is learned, and about the roles that it asks for, as data.

What the two functions read is told by their parameters: none of megarl's own is named here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megarl.algorithms.correction import CORRECTIONS
from megarl.algorithms.inputs import LOSS_INPUTS, parameters
from megarl.algorithms.policy_loss import POLICY_LOSSES
from megarl.recipe.algorithm import Algorithm, Correction, RejectBounds
from megarl.recipe.functions import (
    ADVANTAGE,
    ADVANTAGE_INPUTS,
    ADVANTAGES,
    OF_TOP,
    POLICY_LOSS,
    REWARDS,
    SETTINGS,
    WHITE_BY_FORMULA,
    Asked,
    is_own,
    is_whitened,
)
from megarl.recipe.group_rules import dropped_note
from megarl.recipe.rule import RL, Contradiction, Unread
from megarl.recipe.schema import Recipe
from megarl.recipe.supervised import DpoRecipe, KtoRecipe

UNSEEN_KL = (
    "algorithm.kl_in: reward takes it off tokens' rewards, and nothing asks for these: set algorithm.kl_in to loss"
)


def _takers(names: frozenset[str]) -> str:
    """The functions of megarl's own that have one of these parameters, as `algorithm.advantage to grpo or gpg`."""

    def of(key: str, functions: Mapping[str, Callable[..., Any]]) -> list[str]:
        found = [name for name, function in functions.items() if names & frozenset(parameters(function))]
        return [f"{key} to {' or '.join(filter(None, (', '.join(found[:-1]), found[-1])))}"] if found else []

    return ", or ".join(of(ADVANTAGE, ADVANTAGES) + of(POLICY_LOSS, POLICY_LOSSES))


def _no_advantages(recipe: Recipe) -> str:
    loss = recipe.algorithm.policy_loss
    return f"it is for advantages, and {POLICY_LOSS}: {loss} asks for none: set {_takers(frozenset({'advantages'}))}"


def _setting(name: str) -> Unread:
    """The rule of a key that is a parameter of functions."""

    def needs(recipe: Recipe, asked: Asked) -> str:
        advantage = ADVANTAGES.get(recipe.algorithm.advantage)
        if not asked.advantages and advantage is not None and name in parameters(advantage):
            return _no_advantages(recipe)
        return f"no function of this recipe has such a setting: set {_takers(frozenset({name}))}"

    return Unread((f"algorithm.{name}",), lambda _, asked: asked.by_either(name), needs, RL)


def _is_about_whitening(algorithm: Algorithm) -> bool:
    """Whether algorithm.whiten turns it on, or off where it is on by default."""
    return algorithm.advantage not in WHITE_BY_FORMULA and (algorithm.advantage == "gae" or is_whitened(algorithm))


def _no_whitening(recipe: Recipe, asked: Asked) -> str:
    if not asked.advantages:
        return _no_advantages(recipe)
    if recipe.algorithm.advantage in WHITE_BY_FORMULA:
        return f"{ADVANTAGE}: {recipe.algorithm.advantage} is whitened by its own formula: choose another advantage"
    return (
        "where nothing is said only the advantages of gae are whitened: set it to true, or algorithm.advantage to gae"
    )


def _no_rewards(recipe: Recipe, asked: Asked) -> str:
    if not asked.advantages:
        return _no_advantages(recipe)
    asks = "no rewards" if "reward_parts" not in asked.advantage else "graders' scores, and for no reward beside them"
    return f"{ADVANTAGE}: {recipe.algorithm.advantage} asks for {asks}: set {_takers(REWARDS)}"


def _sees_kl(algorithm: Algorithm, asked: Asked) -> bool:
    """Whether anything would see a KL to the reference: the loss, or what is made of rewards."""
    return algorithm.kl_in == "loss" or asked.token_rewards


def _has_reference(recipe: Recipe, asked: Asked) -> bool:
    algorithm = recipe.algorithm
    return algorithm.kl_coef > 0 and (_sees_kl(algorithm, asked) or "ref_logprobs" in asked.advantage)


def _has_lower_bound(correction: Correction) -> bool:
    return "min_ratio" in parameters(CORRECTIONS[correction.kind])


def _reject_bounds(recipe: Recipe) -> RejectBounds:
    """Those of a second correction; without one, those by default, with which nothing is wrong."""
    correction = recipe.algorithm.correction
    return (correction and correction.reject) or RejectBounds()


def _reserved(algorithm: Algorithm) -> list[str]:
    """Names in algorithm.settings that stand for something else already."""
    return sorted(algorithm.settings.keys() & {*Algorithm.model_fields, *ADVANTAGE_INPUTS, *LOSS_INPUTS})


def _apart(recipe: Recipe) -> bool:
    """Whether actor and reference are in different pools."""
    return any("reference" in pool.roles and "actor" not in pool.roles for pool in recipe.placement.pools.values())


def learning_notes(recipe: Recipe) -> tuple[str, ...]:
    """What a reader of the recipe should know of what is learned; nothing where it is as it should be."""
    return tuple(note for note in (_unheld(recipe.algorithm), dropped_note(recipe)) if note)


def _unheld(algorithm: Algorithm) -> str:
    if algorithm.kl_coef == 0 or algorithm.kl_in != "loss" or algorithm.kl_kind != "k1":
        return ""
    return (
        "algorithm.kl_kind: k1 in the loss holds nothing back: its gradient is that of a log-prob, and the mean of that over "
        "the policy's own samples is 0. Set it to k2, whose gradient is the KL's, or to k3, or algorithm.kl_in to reward."
    )


ALGORITHM_UNREAD: tuple[Unread, ...] = (
    *map(_setting, SETTINGS),
    Unread(
        ("algorithm.distill_beta",),
        lambda r, _: r.algorithm.distill_forward_weight is None,
        "algorithm.distill_forward_weight is in its place: remove that one",
        RL,
    ),
    Unread(
        ("algorithm.advantage", "algorithm.advantage_clip", "algorithm.correction"),
        lambda _, asked: asked.advantages,
        lambda r, _: _no_advantages(r),
        RL,
    ),
    Unread(
        ("algorithm.whiten",),
        lambda r, asked: asked.advantages and _is_about_whitening(r.algorithm),
        _no_whitening,
        RL,
    ),
    Unread(("algorithm.overlong_buffer", "reward_model"), lambda _, asked: asked.rewards, _no_rewards, RL),
    Unread(
        ("reward_model",),
        lambda r, asked: r.reward_model is None or r.reward_model.level == "sequence" or asked.token_rewards,
        "reward_model.level: token rewards tokens, and nothing asks for their rewards: set it to sequence",
        RL,
    ),
    Unread(
        ("algorithm.kl_coef",),
        lambda r, asked: r.algorithm.kl_coef == 0 or _has_reference(r, asked),
        UNSEEN_KL,
        RL,
    ),
    Unread(
        ("algorithm.kl_kind", "algorithm.kl_in"),
        lambda r, asked: r.algorithm.kl_coef > 0 and _sees_kl(r.algorithm, asked),
        lambda r, asked: (
            UNSEEN_KL
            if r.algorithm.kl_coef > 0
            else "it says how the KL to the reference counts, and there is none: set algorithm.kl_coef above 0"
        ),
        RL,
    ),
    Unread(
        ("algorithm.kl_control",),
        lambda r, asked: r.algorithm.kl_coef > 0 and r.algorithm.kl_in == "reward" and asked.token_rewards,
        "only a KL in the reward is steered, and where rewards count: set algorithm.kl_coef above 0 and algorithm.kl_in to "
        "reward",
        RL,
    ),
    Unread(
        ("algorithm.settings",),
        lambda r, asked: is_own(r.algorithm.policy_loss) or (asked.advantages and is_own(r.algorithm.advantage)),
        "it is for functions of your own: name one by import path",
        RL,
    ),
    Unread(
        ("algorithm.max_logprob_diff",),
        lambda r, asked: r.algorithm.old_logprobs == "trainer" and asked.advantages,
        lambda r, asked: (
            "the trainer's own log-probs are not computed: set algorithm.old_logprobs to trainer"
            if asked.advantages
            else _no_advantages(r)
        ),
        RL,
    ),
    Unread(
        ("algorithm.on_logprob_diff",),
        lambda r, _: r.algorithm.max_logprob_diff is not None,
        "no difference is too large: set algorithm.max_logprob_diff",
        RL,
    ),
    Unread(
        ("algorithm.correction.low",),
        lambda r, _: r.algorithm.correction is None or _has_lower_bound(r.algorithm.correction),
        "this correction has no lower bound: set algorithm.correction.kind to mask or reject",
        RL,
    ),
    Unread(
        ("critic",),
        lambda _, asked: "values" in asked.advantage,
        lambda r, asked: (
            f"nothing asks for its values: set {_takers(frozenset({'values'}))}"
            if asked.advantages
            else _no_advantages(r)
        ),
        RL,
    ),
    Unread(
        ("teacher",),
        lambda _, asked: asked.teacher,
        f"nothing asks for its log-probs: set {_takers(OF_TOP | {'teacher_logprobs'})}",
        RL,
    ),
    Unread(
        ("algorithm.distill_top_k",),
        lambda _, asked: asked.teacher_top,
        f"nothing asks for a teacher's likeliest tokens: set {_takers(OF_TOP)}",
        RL,
    ),
    Unread(
        ("reference.offload", "reference.refresh_every"),
        lambda r, asked: _has_reference(r, asked) and r.actor.lora is None,
        "there is no reference model of its own: set algorithm.kl_coef above 0, and no actor.lora",
        RL,
    ),
    Unread(
        ("reference.parallel",),
        _has_reference,
        "without a KL there is no reference model: set algorithm.kl_coef above 0",
        RL,
    ),
)

ALGORITHM_CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction(
        "algorithm.on_logprob_diff",
        lambda r, _: r.algorithm.on_logprob_diff == "rewind" and not r.train.journal,
        lambda _: "what a run goes back over is written in its journal, and train.journal is false: set it to true",
        RL,
    ),
    Contradiction(
        "rollout.samples_per_prompt",
        lambda r, asked: (
            r.rollout.samples_per_prompt < 2
            and not is_own(r.algorithm.advantage)
            and bool(asked.advantage & {"group_index", "sequence_groups"})
            and "greedy_rewards" not in asked.advantage
        ),
        lambda r: (
            f"with algorithm.advantage: {r.algorithm.advantage} a sample is compared with the others of its group, "
            "and a group of 1 has none, so that every advantage would be 0. Set it to 2 or more; 8 is common"
        ),
        RL,
    ),
    Contradiction(
        "algorithm.settings",
        lambda r, _: bool(_reserved(r.algorithm)),
        lambda r: (
            f"{', '.join(_reserved(r.algorithm))} is the name of an input of functions, or of a key of this section, and a "
            "function would be given only one of the two. Set that key, or call the parameter otherwise"
        ),
        RL,
    ),
    Contradiction(
        "teacher",
        lambda r, asked: asked.teacher and r.teacher is None,
        lambda r: "there is nobody to distill from. Add a section teacher with the path or the servers of a model",
        RL,
    ),
    Contradiction(
        "algorithm.correction",
        lambda r, _: r.algorithm.correction is not None and r.algorithm.old_logprobs == "rollout",
        lambda r: (
            "with algorithm.old_logprobs: rollout the trainer's log-probs of the rollout's policy are not computed, and "
            "there is no ratio between the two. Set it to trainer, or remove the correction"
        ),
        RL,
    ),
    Contradiction(
        "algorithm.correction.high",
        lambda r, _: (
            r.algorithm.correction is not None
            and _has_lower_bound(r.algorithm.correction)
            and r.algorithm.correction.low >= r.algorithm.correction.high
        ),
        lambda r: f"it has to be above low {r.algorithm.correction.low:g}; got {r.algorithm.correction.high:g}",
        RL,
    ),
    Contradiction(
        "algorithm.correction.reject.high",
        lambda r, _: _reject_bounds(r).low >= _reject_bounds(r).high,
        lambda r: f"it has to be above low {_reject_bounds(r).low:g}; got {_reject_bounds(r).high:g}",
        RL,
    ),
    Contradiction(
        "algorithm.correction.reject",
        lambda r, _: (
            (chosen := r.algorithm.correction) is not None and chosen.kind == "reject" and chosen.reject is not None
        ),
        lambda _: (
            "algorithm.correction.kind is reject already. Set the kind to truncate or mask, or remove the section reject: "
            "one ratio for whole sequences is bounded by the kind alone"
        ),
        RL,
    ),
    Contradiction(
        "reward_model",
        lambda r, asked: r.reward_model is not None and "greedy_rewards" in asked.advantage,
        lambda r: (
            f"algorithm.advantage: {r.algorithm.advantage} compares with a greedy answer, which only the graders see. "
            "Choose another advantage, or remove the reward model"
        ),
        RL,
    ),
    Contradiction(
        "algorithm.truncated",
        lambda r, asked: r.algorithm.truncated == "mask" and "lengths" in asked.advantage,
        lambda r: (
            f"algorithm.advantage: {r.algorithm.advantage} goes by trained tokens, of which an answer that was cut off would "
            "have none. Set it to learn, or choose another advantage"
        ),
        RL,
    ),
    Contradiction(
        "critic.warmup_steps",
        lambda r, _: r.critic is not None and 0 < r.train.steps <= r.critic.warmup_steps,
        lambda r: (
            f"the actor would never learn: the run has {r.train.steps} steps. Set it to at most {r.train.steps - 1}"
        ),
        RL,
    ),
    Contradiction(
        "reference.parallel",
        lambda r, _: r.actor.lora is not None and r.reference.parallel is not None,
        lambda r: (
            "under actor.lora the reference is the actor's own model without its adapters, at the actor's layout. "
            "Remove reference.parallel"
        ),
        (Recipe, DpoRecipe, KtoRecipe),
    ),
    Contradiction(
        "placement.pools",
        lambda r, _: (r.actor.lora is not None or r.reference.refresh_every is not None) and _apart(r),
        lambda r: (
            "under actor.lora, or with reference.refresh_every, the reference lives on what the actor's ranks have. Put both "
            "into one pool"
        ),
        RL,
    ),
    Contradiction(
        "reference.refresh_every",
        lambda r, _: r.reference.refresh_every is not None and r.reference.parallel not in (None, r.actor.parallel),
        lambda r: "weights are copied part by part, which needs the actor's layout. Remove reference.parallel",
        RL,
    ),
)
