"""Recipes of all kinds of advantages: every preset, and what stands beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.recipe.algorithm import Algorithm
from megarl.recipe.presets import PRESETS
from megarl.recipe.roles import Critic, RewardModel, Teacher
from megarl.recipe.schema import Recipe
from tests.rollout.steps import recipe_of

KL = {"kl_coef": 0.3, "kl_in": "reward", "kl_kind": "k3", "kl_control": {"target": 0.2, "horizon": 50}}
TOKENS, WHOLE = (RewardModel(path=Path("r"), weight=0.5, level=level) for level in ("token", "sequence"))
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gae": ({"advantage": "gae"}, {"critic": Critic()}),
    "gae as it is": ({"advantage": "gae", "whiten": False, "lam": 0.7, "gamma": 0.9}, {"critic": Critic()}),
    "gae with all": (
        {"advantage": "gae", **KL, "overlong_buffer": 0.6, "correction": {"kind": "truncate"}},
        {"critic": Critic(), "reward_model": TOKENS},
    ),
    "reinforce_pp with a KL": ({"advantage": "reinforce_pp", "gamma": 0.9, **KL}, {"reward_model": WHOLE}),
    "distill": ({"advantage": "distill", "correction": {"kind": "mask"}}, {"teacher": Teacher(path=Path("t"))}),
    "rloo with all": (
        {"advantage": "rloo", **KL, "overlong_buffer": 0.6, "correction": {"kind": "reject", "level": "geometric"}},
        {"reward_model": TOKENS},
    ),
    "grpo with a model's score": (
        {"advantage": "grpo", "correction": {"kind": "truncate", "level": "sequence"}},
        {"reward_model": WHOLE},
    ),
    "egpo of the rollout": ({"advantage": "egpo", "old_logprobs": "rollout"}, {}),
    "grpo by turns": ({"advantage": "grpo_turns", **KL}, {"reward_model": WHOLE}),
    "rloo whitened": ({"advantage": "rloo", "whiten": True, "advantage_clip": 1.1, **KL}, {"reward_model": TOKENS}),
    "grpo by turns, whitened": ({"advantage": "grpo_turns", "whiten": True, "correction": {"kind": "mask"}}, {}),
    "nothing but a teacher": ({"policy_loss": "distill"}, {"teacher": Teacher(path=Path("t"))}),
}
OF_TOKENS = ("gae", "reinforce_pp", "distill", "grpo_turns")


def cases() -> dict[str, Recipe]:
    """By name."""
    found = {}
    for name, preset in PRESETS.items():
        algorithm = Algorithm.model_validate(dict(preset))
        sections: dict[str, Any] = {"critic": Critic()} if algorithm.advantage == "gae" else {}
        found[f"preset {name}"] = recipe_of(algorithm, **sections)
    for name, (section, sections) in BESIDE.items():
        found[name] = recipe_of(Algorithm.model_validate(section), **sections)
    return found


CASES = cases()


def roles_of(recipe: Recipe) -> list[str]:
    """The columns that the recipe's roles make."""
    found = ["ref_logprobs", "teacher_logprobs"]
    found += ["old_logprobs"] if recipe.algorithm.old_logprobs == "trainer" else []
    found += ["values"] if recipe.critic is not None else []
    return found + (["scores"] if recipe.reward_model is not None else [])
