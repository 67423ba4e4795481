"""Several environments and harnesses in one run: whose episodes a row's are, what each tells the model, what is refused."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.agents.by_row import PlayersByRow
from megarl.agents.check import check_agent
from megarl.agents.episode import Episodes
from megarl.agents.player import open_player
from megarl.agents.row_kinds import check_kinds
from megarl.core.errors import UserError
from megarl.core.types import Prompt, Sample, Status
from megarl.recipe.agent import Agent
from megarl.recipe.schema import Recipe
from megarl.rollout.asking import Asker
from megarl.rollout.attempt import Attempt
from megarl.rollout.gate import Gate
from megarl.run.rows_check import check_graded
from megarl.serving.client import ServerClient
from megarl.serving.sampling import Sampling
from tests.agents.endpoint.harnesses import TOKENIZER, ids_of, writing
from tests.agents.playing import LONG_S, make_row
from tests.agents.test_environment_tools import COUNTERS, KIT, Reader
from tests.rollout.test_collector import make_recipe
from tests.support.fake_sglang import FakeSglang
from tests.support.processes import ended

SHOP = Path(__file__).parent / "mcp_shop.py"
KINDS: dict[str, Any] = {
    "count": {"environment": f"{COUNTERS}:Counter", "settings": {"target": 3}, "environment_tools": ["add"]},
    "answer": {"environment": f"{COUNTERS}:Answering"},
}


def by_row(folder: Path, **keys: Any) -> Recipe:
    given = {"environments": KINDS, "environment_key": "extra.kind", "tool_parser": "qwen25", "rewritten": "keep"}
    room = {"train": folder / "train.jsonl", "max_prompt_tokens": 1000}
    return make_recipe(folder, agent=given | keys, data=room, reward={"fn": None})


def rows(*kinds: Any) -> list[Prompt]:
    return [make_row("Go.", extra={"kind": kind}) for kind in kinds]


def played(player: PlayersByRow, prompts: list[Prompt]) -> list[Sample]:
    """One episode of each row. The policy adds one as long as it is told of that tool, and says b else."""
    add, end = ids_of("add(by=1)"), ids_of("b")
    fake = writing("b")
    fake._writes = lambda context, most: add if '"name": "add"' in TOKENIZER.decode(context) else end

    async def go() -> list[Sample]:
        async with fake, ServerClient(fake.endpoint, attempts=3, backoff_s=0.001) as client:
            asker = Asker(client, Gate(4, 1), TOKENIZER.decode, deadline_s=LONG_S)
            attempts = [Attempt(each, Sampling(10_000), 1, "train", 3, at) for at, each in enumerate(prompts)]
            try:
                return [*await asyncio.gather(*(player.play(each, asker) for each in attempts))]
            finally:
                await player.close()

    return asyncio.run(asyncio.wait_for(go(), 300))


def opened(recipe: Recipe) -> PlayersByRow:
    router = FakeSglang.__new__(FakeSglang)  # not asked
    player = open_player(recipe, router, "127.0.0.1", TOKENIZER)  # type: ignore[arg-type]
    assert isinstance(player, PlayersByRow)
    for episodes in player._players.values():
        if isinstance(episodes, Episodes) and episodes._settings.tools is not None:
            episodes._settings.tools._parser = Reader()
    return player


@pytest.mark.parametrize("workers", [None, 1])
def test_each_row_is_played_with_its_environment_and_told_of_its_tools_alone(
    tmp_path: Path, workers: int | None
) -> None:
    player = opened(by_row(tmp_path, workers=workers, max_turns=4))
    counted, answered = played(player, rows("count", "answer"))
    assert counted.metadata["turn_rewards"] == [-0.25, -0.25, 1.0], "the third call reaches the target"
    # `step` answers with 0.5 for each of its first three turns, and then with the end, worth 40.
    assert answered.metadata["turn_rewards"] == [0.5, 0.5, 0.5, 40.0] and "tool_calls" not in answered.numbers


def test_functions_and_servers_of_tools_are_for_all_and_there_is_one_of_each(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    keys = {"tools": [f"{KIT}:multiply"], "mcp": [f"{sys.executable} {SHOP} {pids}"]}
    player = opened(by_row(tmp_path, **keys))
    names = {
        name: [schema["function"]["name"] for schema in episodes._settings.tools.schemas]  # type: ignore[attr-defined]
        for name, episodes in player._players.items()
    }
    shop = ["price_of", "close_down", "wait", "leaflet"]
    assert names == {"count": ["multiply", *shop, "add"], "answer": ["multiply", *shop]}
    asyncio.run(player.close())
    [pid] = [int(line) for line in pids.read_text().split()]
    assert ended([pid])


def test_a_row_may_be_a_harness_s_and_another_an_environment_s(tmp_path: Path) -> None:
    script = "import sys; sys.exit(3)"
    kinds = {
        "count": KINDS["count"],
        "web": {"function": "tests.support.dry.own:converse"},
        "script": {"command": [sys.executable, "-c", script]},
    }
    recipe = by_row(tmp_path, environments=kinds, tools=[f"{KIT}:multiply"], max_turns=4)
    assert check_agent(recipe, TOKENIZER) > 0
    counted, asked, ended_early = played(opened(recipe), rows("count", "web", "script"))
    assert counted.metadata["turn_rewards"] == [-0.25, -0.25, 1.0]
    # Two turns; the reward is the length of the model's name, and what the address ends with.
    assert asked.metadata["turn_rewards"] == [0.0, 7.0] and asked.reward == 7.0
    assert ended_early.status is Status.FAILED
    assert "the harness ended: exit code 3" in ended_early.metadata["failure"]


def test_a_harness_that_is_not_there_is_told_of_by_its_name(tmp_path: Path) -> None:
    for wrong, says in (
        ({"command": ["/no/such/program"]}, "there is no program '/no/such/program' to run"),
        ({"function": f"{COUNTERS}:Counter"}, "it is no coroutine"),
    ):
        with pytest.raises(UserError) as caught:
            check_agent(by_row(tmp_path, environments={**KINDS, "odd": wrong}), TOKENIZER)
        assert str(caught.value).startswith("In agent.environments.odd: ") and says in str(caught.value)


def test_every_environment_is_checked_and_the_message_says_of_which_it_speaks(tmp_path: Path) -> None:
    assert check_agent(by_row(tmp_path), TOKENIZER) > 0, "tokens that tell of the tools of one of them"
    for wrong, says in (
        ({"environment": "maze", "settings": {"sise": 3}}, "no such setting of maze. Did you mean size?"),
        ({"environment": f"{COUNTERS}:Counter"}, "Counter has no method 'step'"),
        ({"environment": "maze", "environment_tools": ["look"]}, "'look': Maze has no such method"),
        ({"environment": f"{COUNTERS}:Nobody"}, "Nobody"),
    ):
        with pytest.raises(UserError) as caught:
            check_agent(by_row(tmp_path, environments={**KINDS, "odd": wrong}), TOKENIZER)
        assert str(caught.value).startswith("In agent.environments.odd: ") and says in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (
            "counts",
            "is 'counts', and in agent.environments are count, answer. Did you mean 'count'? Name one in the row",
        ),
        (None, "'extra.kind', which agent.environment_key names, is None"),
        (1, "is 1, and in agent.environments are"),
        (["count"], "is ['count'], and"),
    ],
)
def test_a_row_that_names_no_environment_is_refused(tmp_path: Path, kind: Any, says: str) -> None:
    recipe = by_row(tmp_path)
    good, bad = rows("count", "answer"), rows("count", kind)
    check_graded(recipe, good, [])
    for train, held_out in ((bad + good, []), (good, bad), ([], bad)):
        with pytest.raises(UserError) as caught:
            check_graded(recipe, train, held_out)
        where = "rows.jsonl:1" if held_out else f"{recipe.data.train.with_name('rows.jsonl')}, line 1"
        assert str(caught.value).startswith(f"{where}: no environment is for this row: ")
        assert says in str(caught.value)
    [row] = [make_row("Go.")]
    with pytest.raises(UserError, match="names, is None"):
        check_graded(recipe, [row], [])


def test_an_environment_that_no_row_names_is_refused_where_all_rows_are_there(tmp_path: Path) -> None:
    recipe = by_row(tmp_path)
    with pytest.raises(
        UserError, match=r"`agent.environments.answer`: no row is for it: in 'extra.kind', .* have count\. "
    ):
        check_graded(recipe, rows("count"), [])
    check_graded(recipe, rows("count"), rows("answer"))
    check_graded(recipe, [], rows("count"))  # an evaluation


def test_rows_that_have_no_share_need_no_environment(tmp_path: Path) -> None:
    recipe, given = by_row(tmp_path), rows("count", "other", "answer")
    check_graded(recipe, given, [], {"a": [0, 2]})
    with pytest.raises(UserError, match="is 'other'"):
        check_graded(recipe, given, [], {"a": [0], "b": [1]})


def test_one_environment_asks_nothing_of_rows() -> None:
    row = make_row("Go.")
    check_kinds(Agent(environment="maze"), [row], played=[row])


def test_what_tools_hold_is_closed_though_an_environment_does_not_close() -> None:
    class Stuck:
        async def close(self) -> None:
            raise RuntimeError("stuck")

    class Held:
        closed = False

        async def close(self) -> None:
            self.closed = True

    held = Held()
    players: Any = {"a": Stuck()}
    with pytest.raises(RuntimeError, match="stuck"):
        asyncio.run(PlayersByRow(players, "kind", [held]).close())
    assert held.closed
