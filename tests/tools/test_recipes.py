"""The recipes that the repository ships are read, checked and of one piece."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from megarl.recipe.load import detect_kind, load_recipe
from megarl.recipe.schema import Recipe
from megarl.recipe.supervised import SftRecipe
from tools.make_arithmetic import Problem, make_arithmetic
from tools.make_chains import make_chains
from tools.make_guessing import make_guessing
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
    made = inspect.signature(make_arithmetic).parameters["num_sft"].default
    assert warm_start.train.steps * warm_start.train.batch_samples <= made


@pytest.mark.parametrize("name", ["quickstart_agent", "quickstart_calculator"])
def test_episodes_fit_and_begin_where_their_warm_start_ends(name: str, tmp_path: Path) -> None:
    grpo = load_recipe(RECIPES / f"{name}.yaml").recipe
    sft = load_recipe(RECIPES / f"{name}_sft.yaml", [], SftRecipe).recipe
    assert grpo.model.path == sft.run.folder / "hf" and grpo.agent is not None
    make = make_guessing if name == "quickstart_agent" else make_chains
    make(tmp_path)
    talks = [json.loads(line)["messages"] for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert sft.train.steps * sft.train.batch_samples == len(talks) and not sft.data.shuffle, "each once, in order"
    tokenizer = make_tokenizer()

    def length(messages: list[dict[str, str]], *, asks: bool = False) -> int:
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=asks, return_dict=False))

    longest = max(talks[-300:], key=length)
    prompt = length(longest[:1], asks=True)
    assert prompt <= grpo.data.max_prompt_tokens and length(longest) <= sft.data.max_tokens
    assert len(longest) // 2 == grpo.agent.max_turns and length(longest) - prompt <= grpo.rollout.max_response_tokens
    said = [message["content"] for talk in talks[-300:] for message in talk[1::2]]
    assert max(len(tokenizer.encode(text + tokenizer.eos_token)) for text in said) <= (grpo.agent.turn_tokens or 0)
