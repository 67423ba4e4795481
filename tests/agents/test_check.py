"""What is refused of an agent when the recipe is checked, and how it is said."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from megarl.agents.check import check_agent
from megarl.agents.environments.maze import Maze
from megarl.agents.loading import BUILT_IN, open_environment
from megarl.agents.template import ChatTemplate
from megarl.core.errors import UserError
from megarl.recipe.agent import Agent
from tests.agents.forms import make_tokenizer
from tests.rollout.test_collector import make_recipe

HERE = "tests.agents.test_check"


class Whole:
    def __init__(self, size: int, *, colour: str = "red") -> None:
        if size > 9:
            raise ValueError("size is at most 9")

    async def start(self, row: Any) -> Any: ...
    async def step(self, response: Any) -> Any: ...
    async def close(self) -> None: ...


class Anything(Whole):
    def __init__(self, **settings: Any) -> None: ...


class Holding(Anything):
    """Takes what has to be given back, of the event loop."""

    held: ClassVar[list[str]] = []

    def __init__(self, shared: Any) -> None:
        asyncio.get_running_loop()
        self.held.append("one")

    @staticmethod
    def share() -> Any:
        Holding.held.append("shared")
        return Holding

    async def close(self: Any = None) -> None:
        Holding.held.remove("shared" if self is None else "one")


class Unclosed(Anything):
    async def close(self) -> None:
        raise ValueError("it has not started")


class Misnamed:
    async def start(self, row: Any) -> Any: ...
    async def steps(self, response: Any) -> Any: ...
    async def close(self) -> None: ...


class Blocking(Anything):
    def step(self, response: Any) -> Any: ...  # type: ignore[override]


class Parameterless(Anything):
    async def step(self) -> Any: ...  # type: ignore[override]


def function(row: Any) -> None: ...


def check(folder: Path, tokenizer: Any = None, **agent: Any) -> None:
    check_agent(make_recipe(folder, agent=agent), tokenizer or make_tokenizer("llama3"))


@pytest.mark.parametrize(
    ("environment", "settings", "says"),
    [
        ("no_such_module:Whole", {}, "there is no module 'no_such_module'"),
        (f"{HERE}:Hole", {}, "has no 'Hole'. Did you mean 'Whole'?"),
        (f"{HERE}:function", {}, "it is a function; wanted is a class with the coroutines start, step, close"),
        (
            f"{HERE}:Misnamed",
            {},
            "Misnamed has no method 'step'; wanted is `async def step(self, response)`. Did you mean that by 'steps'?",
        ),
        (f"{HERE}:Blocking", {}, "Blocking.step is no coroutine"),
        (
            f"{HERE}:Parameterless",
            {},
            "Parameterless.step(self) -> 'Any' cannot be called as `async def step(self, response)`",
        ),
        (f"{HERE}:Whole", {"color": "b", "size": 1}, "agent.settings.color: there is no such setting"),
        (f"{HERE}:Whole", {"color": "b", "size": 1}, "Did you mean colour? Its settings: size, colour."),
        (f"{HERE}:Whole", {}, "missing a required argument: 'size'. Its settings: size, colour"),
        (f"{HERE}:Whole", {"size": 10}, "ValueError: size is at most 9. Mend agent.settings"),
        ("guess_number", {"low": 3, "high": 1}, "wanted are low <= high"),
        (
            "maze",
            {"sise": 3},
            "agent.settings.sise: there is no such setting of maze. Did you mean size? Its settings: size, steps.",
        ),
    ],
)
def test_an_environment_that_cannot_be_is_refused_in_words(
    tmp_path: Path, environment: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError) as caught:
        check(tmp_path, environment=environment, settings=settings)
    assert says in str(caught.value)


@pytest.mark.parametrize("environment", [*BUILT_IN, f"{HERE}:Anything"])
def test_those_that_can_be_are_accepted(tmp_path: Path, environment: str) -> None:
    check(tmp_path, environment=environment, settings={"x": 1} if ":" in environment else {})


def test_a_constructor_finds_what_stands_beside_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does in a collector: command-line scripts do not look into the current folder."""
    (tmp_path / "boards_of_mine.py").write_text("SIZE = 3\n")
    (tmp_path / "game_of_mine.py").write_text(
        "class Game:\n"
        "    def __init__(self):\n"
        "        from boards_of_mine import SIZE\n"
        "    async def start(self, row): ...\n"
        "    async def step(self, response): ...\n"
        "    async def close(self): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    check(tmp_path, environment="game_of_mine:Game")
    assert str(tmp_path) not in sys.path


def test_what_is_made_to_be_looked_at_is_made_on_an_event_loop_and_closed(tmp_path: Path) -> None:
    check(tmp_path, environment=f"{HERE}:Holding")
    assert Holding.held == []
    check(tmp_path, environment=f"{HERE}:Unclosed")


def test_an_environment_is_made_anew_each_time_of_the_recipes_settings() -> None:
    made = open_environment(Agent(environment="maze", settings={"size": 4}))
    assert isinstance(made(), Maze) and made() is not made()


def test_a_template_that_rewrites_earlier_turns_is_refused_or_kept_as_the_recipe_says(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"agent\.rewritten: .*renders earlier turns otherwise.*<think>"):
        check(tmp_path, make_tokenizer("qwen3"), environment="maze")
    check(tmp_path, make_tokenizer("qwen3"), environment="maze", max_turns=1)
    for otherwise in ("keep", "split"):
        check(tmp_path, make_tokenizer("qwen3"), environment="maze", rewritten=otherwise)
        for tokenizer, turns in (("llama3", 2), ("qwen3", 1)):
            with pytest.raises(UserError, match=rf"{otherwise} is for .* rewrites none\. Remove the key"):
                check(tmp_path, make_tokenizer(tokenizer), environment="maze", rewritten=otherwise, max_turns=turns)


def test_a_template_that_refuses_turns_as_its_model_writes_them_is_not_split(tmp_path: Path) -> None:
    """As gpt-oss' does: its turns begin with a channel, which the content of a message may not have."""
    harmony = """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
    {%- if '<|channel|>' in message.content %}{{- raise_exception('channel tags in the content') }}{% endif %}
    {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
    {%- endfor %}
    {%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
    tokenizer = make_tokenizer("llama3", template=harmony)
    assert ChatTemplate(tokenizer).as_written("Blue.") == "<|channel|>final<|message|>Blue."
    check(tmp_path, tokenizer, environment="maze", rewritten="keep")
    with pytest.raises(UserError, match=r"agent\.rewritten: split .*channel tags in the content.* Set it to keep\."):
        check(tmp_path, tokenizer, environment="maze", rewritten="split")


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its tokenizer has no chat template"):
        check(tmp_path, make_tokenizer("llama3", template=""), environment="maze")
    broken = make_tokenizer("llama3", template="{{ raise_exception('never') }}")
    with pytest.raises(UserError, match=r"refuses these messages \(never\).*the user's and the assistant's by turns"):
        check(tmp_path, broken, environment="maze")


def test_a_recipe_without_an_agent_has_nothing_to_check(tmp_path: Path) -> None:
    check_agent(make_recipe(tmp_path), None)
