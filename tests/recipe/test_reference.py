"""The page of keys is the generated one; the essential keys exist and are shown with the recipe's own values."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.recipe import reference
from megarl.recipe.explain import Schema
from megarl.recipe.load import KINDS, load_recipe

ROOT = Path(__file__).parents[2]


def test_the_page_is_generated() -> None:
    assert (ROOT / "docs" / "recipe.md").read_text() == reference.page() + "\n"


@pytest.mark.parametrize(
    ("section", "meaning"),
    [
        ("critic", "the value model; there by itself where the advantage is gae"),
        ("critic.parallel", "its own layout; default: the actor's"),
        ("reference.parallel", "its own layout; default: the actor's"),
        ("actor.lora", "train low-rank adapters alone; default: the whole model"),
        ("algorithm.kl_control", "steer kl_coef to a target; default: it stays"),
        ("report.wandb", "also to wandb; default: not"),
    ],
)
def test_a_section_that_may_be_left_out_stands_before_its_keys(section: str, meaning: str) -> None:
    lines = reference.page().splitlines()
    at = lines.index(f"| `{section}` | a section or null | `null` | {meaning} |")
    assert lines[at + 1].startswith(f"| `{section}.")


def test_a_section_of_defaults_has_no_row_of_its_own() -> None:
    assert "| `actor.parallel` |" not in reference.page()


@pytest.mark.parametrize("kind", KINDS)
def test_the_essential_keys_exist_with_a_meaning(kind: str) -> None:
    schema = Schema(KINDS[kind])
    assert len(reference.ESSENTIAL[kind]) <= 10
    for key in reference.ESSENTIAL[kind]:
        assert schema.meaning(tuple(key.split("."))), key


def test_essential_values_are_the_recipes_own() -> None:
    loaded = load_recipe(ROOT / "recipes" / "quickstart.yaml", ["train.steps=7"])
    values = {key: value for key, value, _ in reference.essential("train", loaded.resolved)}
    assert values["train.steps"] == "7" and values["rollout.prompts_per_step"] == "16"
