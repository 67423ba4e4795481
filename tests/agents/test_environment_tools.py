"""Methods of an episode's own environment as tools: whose object is called, what calls are worth, and who says what an end is."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.agents import patience
from megarl.agents.check import check_agent
from megarl.agents.environment_processes import EnvironmentProcesses
from megarl.agents.loading import check_environment, has_step, open_environment
from megarl.agents.player import open_player
from megarl.agents.template import ChatTemplate
from megarl.agents.tool_sources import open_toolbox
from megarl.agents.tool_use import ToolUse
from megarl.core.errors import UserError
from megarl.core.types import Sample, Status
from megarl.recipe.agent import Agent
from megarl.rollout.turns import turns_of
from megarl.serving.call_parser import Parsed, ParsedCall
from megarl.serving.sampling import Sampling
from tests.agents.endpoint.harnesses import TOKENIZER, ids_of, writing
from tests.agents.endpoint.test_session import same
from tests.agents.playing import LONG_S, make_settings, play
from tests.agents.test_tokens import assert_exact
from tests.rollout.test_collector import make_recipe
from tests.support.fake_sglang import FakeSglang
from tests.support.processes import ended

COUNTERS = "tests.agents.counters"
KIT = "tests.agents.toolkit"
TOOLS = ("add", "look", "gives")


class Reader:
    """Reads `add(by=1)` and the like, any number of them, as no real parser does."""

    async def parse(self, text: str, tools: Any = None) -> Parsed:
        found = re.findall(r"(\w+)\((?:(\w+)=(\w+))?\)", text)
        calls = [
            ParsedCall(name, json.dumps({key: int(value) if value.isdigit() else value} if key else {}))
            for name, key, value in found
        ]
        return Parsed(tuple(calls), unread=False)

    async def close(self) -> None:
        return None


def agent(name: str = "Counter", **keys: Any) -> Agent:
    given = {"environment": f"{COUNTERS}:{name}", "environment_tools": TOOLS, "tool_parser": "qwen25"}
    return Agent(**given | keys)


def counted(
    *turns: str, of: Agent | None = None, most: int = 10_000, fake: FakeSglang | None = None, **changes: Any
) -> list[Sample]:
    """Episodes in which the policy writes these turns, one after the other."""
    of = agent() if of is None else of
    tools = ToolUse(open_toolbox(of), Reader())
    processes = EnvironmentProcesses(of) if of.workers is not None else None
    indices = changes.pop("indices", (0,))
    settings = make_settings(
        open_environment(of) if processes is None else processes.make,
        TOKENIZER,
        tools=tools,
        processes=processes,
        has_step=has_step(of),
        template=ChatTemplate(TOKENIZER, tools.schemas),
        **changes,
    )
    fake = writing(*turns) if fake is None else fake
    samples = play(fake, settings, TOKENIZER, sampling=Sampling(most), indices=indices)
    if processes is not None:
        assert ended(process._process.pid for process in processes._workers if process is not None)
    return samples


def told(sample: Sample) -> list[str]:
    """What tools said, in order."""
    return [message["content"] for message in sample.metadata["messages"] if message["role"] == "tool"]


def test_the_model_is_told_of_methods_as_of_functions_but_not_of_the_object() -> None:
    toolbox = open_toolbox(agent(environment_tools=("add", "look"), tools=(f"{KIT}:multiply",)))
    assert [schema["function"]["name"] for schema in toolbox.schemas] == ["multiply", "add", "look"]
    assert toolbox.schemas[1] == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add a number to the count.\n\nZero is none.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": {"by": {"title": "By", "type": "integer"}},
                "required": ["by"],
            },
        },
    }
    [sample] = counted("b")
    assert '"name": "look"' in TOKENIZER.decode(sample.prompt.token_ids)


@pytest.mark.parametrize("workers", [None, 1])
def test_calls_are_worth_what_methods_say_and_the_last_numbers_count(workers: int | None) -> None:
    fake = writing("add(by=1)", "look()", "add(by=2)add(by=3)", "That is all.")
    [sample] = counted(fake=fake, of=agent(workers=workers))
    assert sample.status is Status.COMPLETED
    assert_exact(sample, fake)
    assert told(sample) == ['{"total":1}', '{"total":1}', '{"total":3}', '{"total":6}']
    # Two calls of a turn are worth 2 x -0.25; the end is worth 6 / 10.
    assert sample.metadata["turn_rewards"] == [-0.25, 0.0, -0.5, 0.6]
    assert sample.reward == pytest.approx(-0.15) and sample.reward_parts == {"environment": sample.reward}
    assert turns_of(sample)[:, 1].tolist() == pytest.approx([-0.25, 0.0, -0.5, 0.6])
    numbers = {name: sample.numbers[name] for name in ("turns", "tool_calls", "tool_failures", "by/total")}
    assert numbers == {"turns": 4.0, "tool_calls": 4.0, "tool_failures": 0.0, "by/total": 6.0}


def test_each_episode_has_an_object_of_its_own() -> None:
    """Both add one, and again, and stop at two: with one count between them neither would be told of two."""
    one, end = ids_of("add(by=1)"), ids_of("b")

    def write(context: list[int], most: int) -> list[int]:
        return end if '{"total":2}' in TOKENIZER.decode(context) else one

    fake = writing("b")
    fake._writes = write
    samples = counted(fake=fake, indices=(0, 1), max_turns=5)
    assert [(sample.status, told(sample)) for sample in samples] == [
        (Status.COMPLETED, ['{"total":1}', '{"total":2}'])
    ] * 2
    assert [sample.reward for sample in samples] == [pytest.approx(-0.5 + 0.2)] * 2


@pytest.mark.parametrize("workers", [None, 1])
def test_a_method_may_end_the_episode_and_calls_after_it_are_not_made(workers: int | None) -> None:
    of = agent(settings={"target": 3}, workers=workers)
    [sample] = counted("add(by=1)", "add(by=2)add(by=50)", "never", of=of)
    assert sample.status is Status.COMPLETED
    assert sample.metadata["turn_rewards"] == [-0.25, 1.0]
    # What ended it is told to nobody, but its numbers stay, with those before.
    assert sample.metadata["messages"][-1]["content"] == "add(by=2)add(by=50)" and sample.loss_mask[-1] == 1
    found = {name: sample.numbers[name] for name in ("by/total", "by/reached", "tool_calls", "tool_failures")}
    assert found == {"by/total": 1.0, "by/reached": 1.0, "tool_calls": 3.0, "tool_failures": 1.0}


@pytest.mark.parametrize("workers", [None, 1])
@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("add(by=0)", "error: add raised ValueError: zero adds nothing"),
        ("add(by=many)", "error: wrong arguments: by: Input should be a valid integer"),
        ("add()", "error: wrong arguments: by: Field required"),
        ("look(self=1)", "error: wrong arguments: self: Extra inputs are not permitted"),
        ("reward()", "error: there is no tool 'reward'. Tools: add, look, gives"),
        ("gives(what=exit)", "error: gives raised RuntimeError: it exits (3)"),
        ("gives(what=half)", "error: gives raised PydanticSerializationError"),
        ("gives(what=hang)", "error: gives did not end within 3 s"),
    ],
)
def test_what_goes_wrong_in_a_call_is_told_and_the_episode_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int | None, call: str, says: str
) -> None:
    """What hangs does so until the policy is asked for the turn after it; the deadline is that of the call before, too."""
    monkeypatch.setattr(patience, "GRACE_S", 0.1)
    fake, turn, goes_on = writing("add(by=4)", call, "b"), itertools.count(1), tmp_path / "goes on"
    plain = fake._writes

    def write(context: list[int], most: int) -> list[int]:
        if next(turn) == 3:
            goes_on.touch()
        return plain(context, most)

    fake._writes = write
    of = agent(settings={"until": str(goes_on)}, tool_timeout_s=3.0 if "hang" in call else LONG_S, workers=workers)
    [sample] = counted(fake=fake, of=of)
    assert sample.status is Status.COMPLETED, sample.metadata
    assert told(sample)[1].startswith(says)
    assert sample.numbers["tool_failures"] == 1.0
    assert sample.metadata["turn_rewards"] == [-0.25, 0.0, 0.4]


@pytest.mark.parametrize("workers", [None, 1])
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("turn", "gives gave a Turn; wanted is what the policy is told, as text or as what becomes JSON"),
        ("nan", "gives gave nan as a reward; wanted is a finite number"),
        ("metric", "gives gave a metric 'so many'"),
    ],
)
def test_nonsense_costs_the_episode_and_the_calls_after_it(what: str, says: str, workers: int | None) -> None:
    [sample] = counted(f"gives(what={what})add(by=1)", "b", of=agent(workers=workers))
    assert sample.status is Status.FAILED and sample.numbers == {"environment_failures": 1.0}
    assert says in sample.metadata["failure"]


def test_a_process_that_dies_in_a_call_costs_the_episode() -> None:
    [sample] = counted("gives(what=die)", "b", of=agent(workers=1))
    assert sample.status is Status.FAILED and sample.numbers == {"environment_failures": 1.0}
    assert "its process ended: signal SIGKILL" in sample.metadata["failure"]


def test_a_method_that_blocks_has_its_own_thread_in_workers_and_another_on_the_event_loop() -> None:
    for workers, own in ((1, "true"), (None, "false")):
        [sample] = counted("gives(what=thread)", "b", of=agent(workers=workers))
        assert told(sample) == [own]


@pytest.mark.parametrize("workers", [None, 1])
@pytest.mark.parametrize(("name", "worth", "total"), [("Counter", 0.5, 5.0), ("Ended", 1.25, 50.0)])
def test_an_environment_without_step_says_what_the_end_was_worth(
    workers: int | None, name: str, worth: float, total: float
) -> None:
    [sample] = counted("add(by=5)", "b", of=agent(name, workers=workers))
    assert sample.status is Status.COMPLETED and sample.metadata["turn_rewards"] == [-0.25, worth]
    assert sample.numbers["by/total"] == total, "what the end says is the last"


@pytest.mark.parametrize(
    ("changes", "most", "over", "rewards"),
    [
        ({"max_turns": 2}, 10_000, "turns", [-0.25, -0.25 + 0.2]),
        ({"turn_tokens": 3}, 10_000, "tokens", [0.0]),  # its first turn is cut off, and calls nothing
        ({}, 30, "tokens", [-0.25 + 0.1]),  # there is no room for what the tool said
        ({}, 66, "tokens", [-0.25, 0.1]),  # its second turn is cut off
    ],
)
def test_it_says_so_of_an_episode_that_a_budget_ends_too(
    changes: dict[str, Any], most: int, over: str, rewards: list[float]
) -> None:
    [sample] = counted("add(by=1)", most=most, **changes)
    assert sample.status is Status.TRUNCATED and sample.numbers[f"truncated_by/{over}"] == 1.0
    assert sample.metadata["turn_rewards"] == pytest.approx(rewards)
    assert sample.reward == pytest.approx(sum(rewards)) and len(turns_of(sample)) == len(rewards)


def test_a_reward_that_is_none_costs_the_episode() -> None:
    [sample] = counted("b", of=agent("Mistaken"))
    assert sample.status is Status.FAILED and "reward gave 'much' as a reward" in sample.metadata["failure"]


def test_with_step_a_turn_without_a_call_goes_there_and_an_end_by_a_budget_keeps_what_there_is() -> None:
    turns = ("add(by=1)", "a", "look()", "b")
    [sample] = counted(*turns, of=agent("Answering"))
    assert sample.metadata["turn_rewards"] == [-0.25, 0.5, 0.0, 21.0] and told(sample)[1] == '{"total":11}'
    [cut] = counted(*turns, of=agent("Answering"), max_turns=2)
    assert cut.status is Status.TRUNCATED and cut.metadata["turn_rewards"] == [-0.25, 0.5]


def test_bounds_of_calls_and_results_hold_for_methods() -> None:
    [sample] = counted("add(by=1)add(by=1)", "look()", "b", of=agent(max_calls=1, tool_result_characters=5))
    assert told(sample)[0] == '{"\n[7 characters left out]\n1}' and told(sample)[1].startswith("er\n[")
    assert sample.metadata["turn_rewards"] == [-0.25, 0.0, 0.1] and sample.numbers["tool_results_cut"] == 3.0


def test_workers_play_the_same_episode() -> None:
    turns = ("add(by=1)look()", "look()", "b")
    [own] = counted(*turns)
    [theirs] = counted(*turns, of=agent(workers=1))
    same(own, theirs)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"environment_tools": ["ad"]},
            "'ad': Counter has no such method. Did you mean 'add'? It has: add, best, gives,",
        ),
        ({"environment_tools": ["step"]}, "'step': megarl itself calls start, step, close, reward, share"),
        ({"environment_tools": ["reward"]}, "'reward': megarl itself calls"),
        ({"environment_tools": ["count"]}, "'count': in Counter it is no method of the object's (it is a property)"),
        ({"environment_tools": ["best"]}, "'best': in Counter it is no method of the object's (it is a staticmethod)"),
        ({"environment_tools": ["unhinted"]}, "parameter 'by' of unhinted has no type hint"),
        ({"environment_tools": ["look", "add", "look"]}, "two tools have the name 'look'"),
        ({"tools": [f"{KIT}:look_up", f"{KIT}:gives"]}, "two tools have the name 'gives'"),
        ({"environment": "maze"}, "'add': Maze has no such method. It has: none."),
        (
            {"environment": f"{COUNTERS}:Silent", "environment_tools": ["look"]},
            "Silent has no method 'step'; wanted is `async def step(self, response)`. Or `def reward(self)`, where a turn",
        ),
        ({"environment": f"{COUNTERS}:Silent", "environment_tools": []}, "Silent has no method 'step'"),
    ],
)
def test_what_cannot_be_is_refused_when_the_recipe_is_checked(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    given = {"environment": f"{COUNTERS}:Counter", "environment_tools": TOOLS, "tool_parser": "qwen25"} | keys
    recipe = make_recipe(tmp_path, agent=given | {"rewritten": "keep"})
    with pytest.raises(UserError) as caught:
        check_agent(recipe, TOKENIZER)
    assert says in str(caught.value) and "agent." in str(caught.value)


def test_without_tools_step_is_wanted_though_there_is_a_reward() -> None:
    check_environment(agent())
    with pytest.raises(UserError, match="Counter has no method 'step'"):
        check_environment(Agent(environment=f"{COUNTERS}:Counter"))


def test_a_recipe_with_methods_is_accepted_and_played_with_them(tmp_path: Path) -> None:
    given = {"environment": f"{COUNTERS}:Counter", "environment_tools": TOOLS, "tool_parser": "qwen25"}
    recipe = make_recipe(tmp_path, agent=given | {"rewritten": "keep"})
    assert check_agent(recipe, TOKENIZER) > 0, "tokens that tell of them"
    router = FakeSglang.__new__(FakeSglang)  # not asked
    settings = open_player(recipe, router, "127.0.0.1", TOKENIZER)._settings  # type: ignore[attr-defined, arg-type]
    assert not settings.has_step and settings.rewards
    assert [schema["function"]["name"] for schema in settings.tools.schemas] == [*TOOLS]
