"""The recipes that the repository ships are read, checked and of one piece."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.recipe.load import detect_kind, load_recipe
from megarl.recipe.schema import Recipe
from megarl.recipe.supervised import SftRecipe
from tools.make_arithmetic import Problem
from tools.make_tiny_model import make_tokenizer

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def grpo() -> Recipe:
    return load_recipe(RECIPES / "quickstart.yaml").recipe


@pytest.fixture(scope="module")
def warm_start() -> SftRecipe:
    return load_recipe(RECIPES / "quickstart_sft.yaml", [], SftRecipe).recipe


@pytest.mark.parametrize("path", sorted(RECIPES.glob("quickstart*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_of_the_quickstart_is_read(path: Path) -> None:
    loaded = load_recipe(path, [], detect_kind(path))
    assert path.stem == "quickstart_base" or loaded.recipe.run.name == path.stem.replace("_", "-")


def test_the_quickstart_trains_what_its_warm_start_exports(grpo: Recipe, warm_start: SftRecipe) -> None:
    assert grpo.model.path == warm_start.run.folder / "hf"


def test_the_longest_worked_answer_fits(grpo: Recipe, warm_start: SftRecipe) -> None:
    tokenizer = make_tokenizer()
    problem = Problem(999, 999)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": problem.question}], add_generation_prompt=True, return_dict=False
    )
    response = tokenizer.encode(problem.worked() + tokenizer.eos_token)
    assert len(prompt) <= grpo.data.max_prompt_tokens
    assert len(response) <= grpo.rollout.max_response_tokens
    assert len(prompt) + len(response) <= warm_start.data.max_tokens


def test_the_warm_start_sees_no_demonstration_twice(warm_start: SftRecipe) -> None:
    assert warm_start.train.steps * warm_start.train.batch_samples <= 16384
