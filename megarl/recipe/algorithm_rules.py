"""The rules about what is learned, and about the roles that it asks for, as data."""

from __future__ import annotations

from megarl.recipe.rule import Contradiction, Unread
from megarl.recipe.schema import Recipe
from megarl.recipe.supervised import DpoRecipe

# Advantages that compare a sample with the others of its group.
OF_GROUPS = ("grpo", "rloo", "reinforce_pp_baseline", "opo", "gpg", "egpo")
UNCLIPPED = ("reinforce", "gpg", "distill")
RL = (Recipe,)


def _own(name: str) -> bool:
    """Whether a function is the user's: named by import path, it may read any setting."""
    return ":" in name


def _distills(recipe: Recipe) -> bool:
    return "distill" in (recipe.algorithm.advantage, recipe.algorithm.policy_loss)


def _apart(recipe: Recipe) -> bool:
    """Whether actor and reference are in different pools."""
    return any("reference" in pool.roles and "actor" not in pool.roles for pool in recipe.placement.pools.values())


ALGORITHM_UNREAD: tuple[Unread, ...] = (
    Unread(
        ("algorithm.kl_kind", "algorithm.kl_in"),
        lambda r: r.algorithm.kl_coef > 0,
        "it says how the KL to the reference counts, and there is none: set algorithm.kl_coef above 0",
        RL,
    ),
    Unread(
        ("algorithm.kl_control",),
        lambda r: r.algorithm.kl_coef > 0 and r.algorithm.kl_in == "reward",
        "only a KL in the reward is steered: set algorithm.kl_coef above 0 and algorithm.kl_in to reward",
        RL,
    ),
    Unread(
        ("algorithm.normalize_std",),
        lambda r: r.algorithm.advantage in ("grpo", "gpg", "egpo") or _own(r.algorithm.advantage),
        "only the advantages grpo, gpg and egpo divide by a group's deviation: set algorithm.advantage to one of them",
        RL,
    ),
    Unread(
        ("algorithm.gamma",),
        lambda r: r.algorithm.advantage in ("gae", "reinforce_pp") or _own(r.algorithm.advantage),
        "only advantages of tokens discount: set algorithm.advantage to gae or reinforce_pp",
        RL,
    ),
    Unread(
        ("algorithm.lam",),
        lambda r: r.algorithm.advantage == "gae" or _own(r.algorithm.advantage),
        "only generalized advantage estimation has it: set algorithm.advantage to gae",
        RL,
    ),
    Unread(
        ("algorithm.whiten",),
        lambda r: r.algorithm.advantage == "gae",
        "it is for generalized advantage estimation: set algorithm.advantage to gae",
        RL,
    ),
    Unread(
        ("algorithm.clip_low", "algorithm.clip_high"),
        lambda r: r.algorithm.policy_loss not in UNCLIPPED,
        "this policy loss has no ratio to clip: set algorithm.policy_loss to ppo, gspo or cispo",
        RL,
    ),
    Unread(
        ("algorithm.dual_clip",),
        lambda r: r.algorithm.policy_loss == "ppo" or _own(r.algorithm.policy_loss),
        "only PPO's loss has a second clip: set algorithm.policy_loss to ppo",
        RL,
    ),
    Unread(
        ("algorithm.settings",),
        lambda r: _own(r.algorithm.advantage) or _own(r.algorithm.policy_loss),
        "it is for functions of your own: name one by import path",
        RL,
    ),
    Unread(
        ("algorithm.refill_rounds",),
        lambda r: r.algorithm.drop_zero_variance_groups,
        "nothing is dropped that could be asked again: set algorithm.drop_zero_variance_groups to true",
        RL,
    ),
    Unread(
        ("algorithm.correction.low",),
        lambda r: r.algorithm.correction is None or r.algorithm.correction.kind != "truncate",
        "truncation has no lower bound: set algorithm.correction.kind to mask or reject",
        RL,
    ),
    Unread(
        ("critic",),
        lambda r: r.algorithm.advantage == "gae" or _own(r.algorithm.advantage),
        "no other advantage asks for values: set algorithm.advantage to gae",
        RL,
    ),
    Unread(
        ("teacher",),
        lambda r: _distills(r) or _own(r.algorithm.advantage) or _own(r.algorithm.policy_loss),
        "nothing asks the teacher: set algorithm.policy_loss or algorithm.advantage to distill",
        RL,
    ),
    Unread(
        ("reference.resting", "reference.refresh_every"),
        lambda r: r.algorithm.kl_coef > 0 and r.actor.lora is None,
        "there is no reference model of its own: set algorithm.kl_coef above 0, and no actor.lora",
        RL,
    ),
    Unread(
        ("reference.parallel",),
        lambda r: r.algorithm.kl_coef > 0,
        "without a KL there is no reference model: set algorithm.kl_coef above 0",
        RL,
    ),
)

ALGORITHM_CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction(
        "rollout.samples_per_prompt",
        lambda r: (
            r.rollout.samples_per_prompt < 2
            and r.algorithm.advantage in OF_GROUPS
            and r.algorithm.policy_loss != "distill"
        ),
        lambda r: (
            f"with algorithm.advantage: {r.algorithm.advantage} a sample is compared with the others of its group, "
            "and a group of 1 has none, so that every advantage would be 0. Set it to 2 or more; 8 is common"
        ),
        RL,
    ),
    Contradiction(
        "teacher",
        lambda r: _distills(r) and r.teacher is None,
        lambda r: "there is nobody to distill from. Add a section teacher with the path of a model",
        RL,
    ),
    Contradiction(
        "algorithm.correction",
        lambda r: r.algorithm.correction is not None and r.algorithm.old_logprobs == "rollout",
        lambda r: (
            "with algorithm.old_logprobs: rollout the trainer's log-probs of the rollout's policy are not computed, and "
            "there is no ratio between the two. Set it to trainer, or remove the correction"
        ),
        RL,
    ),
    Contradiction(
        "algorithm.correction.high",
        lambda r: (
            r.algorithm.correction is not None
            and r.algorithm.correction.kind != "truncate"
            and r.algorithm.correction.low >= r.algorithm.correction.high
        ),
        lambda r: f"it has to be above low {r.algorithm.correction.low:g}; got {r.algorithm.correction.high:g}",
        RL,
    ),
    Contradiction(
        "reward_model",
        lambda r: r.reward_model is not None and r.algorithm.advantage == "remax",
        lambda r: (
            "ReMax compares with a greedy answer, which only the graders see. Choose another advantage, or remove the "
            "reward model"
        ),
        RL,
    ),
    Contradiction(
        "algorithm.drop_zero_variance_groups",
        lambda r: r.reward_model is not None and r.algorithm.drop_zero_variance_groups,
        lambda r: (
            "groups are dropped by what the graders say, before the reward model scores them. Set it to false, or remove "
            "the reward model"
        ),
        RL,
    ),
    Contradiction(
        "critic.warmup_steps",
        lambda r: r.critic is not None and r.critic.warmup_steps >= r.train.steps,
        lambda r: (
            f"the actor would never learn: the run has {r.train.steps} steps. Set it to at most {r.train.steps - 1}"
        ),
        RL,
    ),
    Contradiction(
        "reference.parallel",
        lambda r: r.actor.lora is not None and r.reference.parallel is not None,
        lambda r: (
            "under actor.lora the reference is the actor's own model without its adapters, at the actor's layout. "
            "Remove reference.parallel"
        ),
        (Recipe, DpoRecipe),
    ),
    Contradiction(
        "placement.pools",
        lambda r: (r.actor.lora is not None or r.reference.refresh_every is not None) and _apart(r),
        lambda r: (
            "under actor.lora, or with reference.refresh_every, the reference lives on what the actor's ranks have. Put both "
            "into one pool"
        ),
        RL,
    ),
    Contradiction(
        "reference.refresh_every",
        lambda r: r.reference.refresh_every is not None and r.reference.parallel not in (None, r.actor.parallel),
        lambda r: "weights are copied part by part, which needs the actor's layout. Remove reference.parallel",
        RL,
    ),
)
