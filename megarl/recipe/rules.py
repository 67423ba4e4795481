"""The rules that `check.py` holds recipes to, as data: keys that nothing reads, and values that contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.recipe.supervised import SftRecipe


@dataclass(frozen=True)
class Unread:
    """Keys that nothing reads unless `read(recipe)`; `needs` says what would make them count."""

    keys: tuple[str, ...]
    read: Callable[[Any], bool]
    needs: str
    kinds: tuple[type[AnyRecipe], ...] = (Recipe, SftRecipe)


@dataclass(frozen=True)
class Contradiction:
    """A key whose value cannot go with the others when `wrong(recipe)`; `says(recipe)` names values and way out."""

    key: str
    wrong: Callable[[Any], bool]
    says: Callable[[Any], str]
    kinds: tuple[type[AnyRecipe], ...] = (Recipe, SftRecipe)


UNREAD_RULES: tuple[Unread, ...] = (
    Unread(
        ("algorithm.kl_kind",),
        lambda r: r.algorithm.kl_coef > 0,
        "it chooses how the KL to the reference is estimated, and there is none: set algorithm.kl_coef above 0",
        (Recipe,),
    ),
    Unread(
        ("algorithm.normalize_std",),
        lambda r: r.algorithm.advantage in ("grpo", "gpg", "egpo"),
        "only the advantages grpo, gpg and egpo divide by a group's deviation: set algorithm.advantage to one of them",
        (Recipe,),
    ),
    Unread(
        ("algorithm.clip_low", "algorithm.clip_high"),
        lambda r: r.algorithm.policy_loss != "reinforce",
        "plain REINFORCE has no ratio to clip: set algorithm.policy_loss to ppo, gspo or cispo",
        (Recipe,),
    ),
    Unread(
        ("algorithm.dual_clip",),
        lambda r: r.algorithm.policy_loss == "ppo",
        "only PPO's loss has a second clip: set algorithm.policy_loss to ppo",
        (Recipe,),
    ),
    Unread(
        ("reference.resting",),
        lambda r: r.algorithm.kl_coef > 0 and r.actor.lora is None,
        "there is no reference model of its own: set algorithm.kl_coef above 0, and no actor.lora",
        (Recipe,),
    ),
    Unread(
        ("reference.parallel",),
        lambda r: r.algorithm.kl_coef > 0,
        "without a KL there is no reference model: set algorithm.kl_coef above 0",
        (Recipe,),
    ),
    Unread(
        ("actor.optimizer.beta1", "actor.optimizer.beta2", "actor.optimizer.eps"),
        lambda r: r.actor.optimizer.name == "adam",
        "only Adam has it: set actor.optimizer.name to adam",
    ),
    Unread(
        ("actor.optimizer.momentum",),
        lambda r: r.actor.optimizer.name == "sgd",
        "only SGD has it: set actor.optimizer.name to sgd",
    ),
    Unread(
        ("actor.optimizer.min_lr",),
        lambda r: r.actor.optimizer.schedule != "constant",
        "a constant schedule never goes down: set actor.optimizer.schedule to linear or cosine",
    ),
    Unread(
        ("eval.every", "eval.temperature", "eval.samples_per_prompt", "eval.max_prompts"),
        lambda r: r.data.eval is not None,
        "there are no held-out rows to evaluate on: set data.eval to a file",
        (Recipe,),
    ),
    Unread(
        ("deadlines.rollout_s", "deadlines.sync_s", "report.samples"),
        lambda r: False,
        "a supervised run has no rollout: it belongs to recipes of `megarl train`",
        (SftRecipe,),
    ),
)

# Flags of SGLang that megarl sets itself, to the recipe's key that decides them.
OWNED_FLAGS: Mapping[str, str] = {
    "--model-path": "model.path",
    "--model": "model.path",
    "--dtype": "model.dtype",
    "--tp-size": "rollout.tp",
    "--tp": "rollout.tp",
    "--tensor-parallel-size": "rollout.tp",
    "--max-running-requests": "rollout.max_running_requests",
    "--max-total-tokens": "rollout.kv_tokens",
    "--random-seed": "run.seed",
    "--weight-version": "nothing: the driver counts the versions",
    "--host": "nothing: servers listen on the cluster's interface only",
    "--port": "nothing: a free port is chosen",
    "--api-key": "nothing: a key is made for each run",
}


def _owned_flags(recipe: Recipe) -> list[str]:
    return [flag for word in recipe.rollout.server_args if (flag := word.partition("=")[0]) in OWNED_FLAGS]


CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction(
        "rollout.samples_per_prompt",
        lambda r: r.rollout.samples_per_prompt < 2,
        lambda r: (
            f"with algorithm.advantage: {r.algorithm.advantage} a sample is compared with the others of its group, "
            "and a group of 1 has none, so that every advantage would be 0. Set it to 2 or more; 8 is common"
        ),
        (Recipe,),
    ),
    Contradiction(
        "rollout.top_k",
        lambda r: r.rollout.top_k == 0 or r.rollout.top_k < -1,
        lambda r: f"got {r.rollout.top_k}; allowed: -1 (off), or 1 and more",
        (Recipe,),
    ),
    Contradiction(
        "rollout.stop",
        lambda r: "" in r.rollout.stop,
        lambda r: "an empty stop string ends every response at once. Remove it from the list",
        (Recipe,),
    ),
    Contradiction(
        "rollout.kv_tokens",
        lambda r: r.rollout.kv_tokens is not None and r.rollout.kv_tokens < longest_sample(r),
        lambda r: (
            f"a server's cache of {r.rollout.kv_tokens} tokens does not hold one sample of data.max_prompt_tokens "
            f"{r.data.max_prompt_tokens} + rollout.max_response_tokens {r.rollout.max_response_tokens} tokens. "
            f"Set it to {longest_sample(r)} or more"
        ),
        (Recipe,),
    ),
    Contradiction(
        "rollout.server_args",
        lambda r: bool(_owned_flags(r)),
        lambda r: (
            "megarl sets some of these flags itself. Remove "
            + ", ".join(f"{flag} (decided by {OWNED_FLAGS[flag]})" for flag in _owned_flags(r))
        ),
        (Recipe,),
    ),
    Contradiction(
        "reference.parallel",
        lambda r: r.actor.lora is not None and r.reference.parallel is not None,
        lambda r: (
            "under actor.lora the reference is the actor's own model without its adapters, at the actor's layout. "
            "Remove reference.parallel"
        ),
        (Recipe,),
    ),
    Contradiction(
        "reference.resting",
        lambda r: any(part != "params" for part in r.reference.resting),
        lambda r: (
            f"a frozen model has neither gradients nor an optimizer; got {', '.join(r.reference.resting)}. "
            "Choose params, or nothing"
        ),
        (Recipe,),
    ),
    Contradiction(
        "eval.samples_per_prompt",
        lambda r: r.eval.samples_per_prompt > 1 and r.eval.temperature == 0,
        lambda r: (
            f"{r.eval.samples_per_prompt} greedy answers to one prompt are all the same. "
            "Set eval.temperature above 0, or eval.samples_per_prompt to 1"
        ),
        (Recipe,),
    ),
    Contradiction(
        "actor.optimizer.min_lr",
        lambda r: r.actor.optimizer.schedule != "constant" and r.actor.optimizer.min_lr > r.actor.optimizer.lr,
        lambda r: (
            f"a schedule goes down from actor.optimizer.lr {r.actor.optimizer.lr:g} to min_lr, and "
            f"{r.actor.optimizer.min_lr:g} is above it. Set it to at most {r.actor.optimizer.lr:g}"
        ),
    ),
)


def longest_sample(recipe: Recipe) -> int:
    """Most tokens of one sample: prompt and response."""
    return recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
