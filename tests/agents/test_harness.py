"""Harnesses in processes of their own: what they play, and that nothing of them stays, however they end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.agents import harness_process
from megarl.agents.check import check_agent
from megarl.agents.endpoint.session import EpisodeSession
from megarl.agents.environment import Done, EpisodeRow
from megarl.agents.environments.guess_number import GuessNumber
from megarl.agents.harness import Harnesses
from megarl.agents.harness_kinds import CommandHarness
from megarl.agents.harness_process import EPISODE_VARIABLE, row_json
from megarl.agents.player import open_player
from megarl.core.errors import UserError
from megarl.core.types import Sample, Status
from tests.agents.endpoint.harnesses import MODEL, TOKENIZER, guess, harnessed, writing
from tests.agents.endpoint.test_session import TURNS, same
from tests.agents.forms import make_tokenizer
from tests.agents.playing import make_settings, play
from tests.rollout.test_collector import make_recipe
from tests.support.fake_sglang import FakeSglang
from tests.support.processes import ended

HERE = "tests.agents.test_harness"
SCRIPT = Path(__file__).parent / "endpoint" / "script.py"
# Asks once, by the standard library.
ASKS = """
import json, os, sys, time, signal, subprocess, urllib.request
row = json.loads(sys.stdin.readline())
def post(path, body):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).read()
post("/chat/completions", {"model": os.environ["OPENAI_MODEL"], "messages": row["messages"]})
"""


def command(code: str, *arguments: str) -> CommandHarness:
    return CommandHarness((sys.executable, "-c", ASKS + code, *arguments), MODEL)


def one(code: str, *arguments: str, **changes: Any) -> Sample:
    [sample] = harnessed(writing("5"), command(code, *arguments), **changes)
    return sample


def marked() -> list[int]:
    """Pids of all processes that a harness of this process has started."""
    mark = f"{EPISODE_VARIABLE}=".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"PYTEST_OF={os.getpid()}".encode() in (entry / "environ").read_bytes():
                found += [int(entry.name)] if mark in (entry / "environ").read_bytes() else []
        except OSError:
            continue  # it ended meanwhile
    return found


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTEST_OF", str(os.getpid()))
    yield
    assert marked() == []


def test_an_unmodified_script_leaves_the_same_sample_as_the_environment() -> None:
    inside, outside = writing(*TURNS), writing(*TURNS)
    [own] = play(inside, make_settings(GuessNumber, TOKENIZER), TOKENIZER)
    [theirs] = harnessed(outside, CommandHarness((sys.executable, str(SCRIPT)), MODEL))
    same(own, theirs)
    assert inside.bodies("/generate") == outside.bodies("/generate")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('no such door'); sys.exit(3)", "the harness ended: exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "the harness ended: signal SIGKILL"),
        ("raise KeyError('no such door')", "the harness ended: exit code 1"),
        ("", "the harness ended without a reward"),
    ],
)
def test_a_harness_that_vanishes_costs_its_episode_alone(code: str, says: str) -> None:
    sample = one(code)
    assert sample.status is Status.FAILED and says in sample.metadata["failure"]
    assert sample.numbers == {"environment_failures": 1.0}
    if "door" in code:
        assert "no such door" in sample.metadata["trace"]


def test_one_that_is_killed_takes_no_other_with_it(tmp_path: Path) -> None:
    """The first three to say so are killed, while others play."""
    code = """
for place in "123":
    try:
        open(sys.argv[1] + place, "x")
    except FileExistsError:
        continue
    os.kill(os.getpid(), signal.SIGKILL)
post("/episode/reward", {"reward": 1.0})
"""
    samples = harnessed(writing("5"), command(code, f"{tmp_path}/"), indices=range(6), most=3)
    died = [sample for sample in samples if sample.status is Status.FAILED]
    lived = [sample.reward for sample in samples if sample.status is Status.COMPLETED]
    assert [sample.metadata["failure"] for sample in died] == ["the harness ended: signal SIGKILL"] * 3
    assert lived == [1.0] * 3


@pytest.mark.parametrize(("most", "at_once"), [(3, 3), (None, 7)])
def test_so_many_play_at_once_and_others_wait(most: int | None, at_once: int) -> None:
    """Each goes on when as many play as may: fewer would wait for ever, and more are counted."""
    playing: list[str] = []
    seen: list[int] = []

    async def waits(client: Any, row: EpisodeRow) -> float:
        playing.append(row.id)
        while not seen:
            await asyncio.sleep(0)
        await client.chat.completions.create(model=MODEL, messages=list(row.messages))
        seen.append(len(playing))
        playing.remove(row.id)
        return 1.0

    async def look(harnesses: Harnesses) -> None:
        while len(playing) < at_once:
            await asyncio.sleep(0)
        for _ in range(200):  # whoever does not wait for room has begun by then
            await asyncio.sleep(0)
        seen.append(len(playing))

    samples = harnessed(writing("5"), waits, indices=range(7), most=most, beside=look)
    assert [sample.reward for sample in samples] == [1.0] * 7
    assert max(seen) == seen[0] == at_once


def test_graders_may_reward_instead() -> None:
    sample = one("", graded=True)
    assert sample.status is Status.COMPLETED and sample.reward_parts == {} and sample.reward == 0.0


def test_all_that_a_harness_started_ends_with_it(tmp_path: Path) -> None:
    """Its own children, and one that has left its session."""
    code = """
children = [subprocess.Popen(["sleep", "600"], start_new_session=new) for new in (False, True)]
open(sys.argv[1], "w").write(" ".join(str(child.pid) for child in children))
post("/episode/reward", {"reward": 1.0})
"""
    sample = one(code, str(tmp_path / "pids"))
    assert sample.reward == 1.0 and sample.status is Status.COMPLETED, "who still holds its output is not waited for"
    assert ended(int(pid) for pid in (tmp_path / "pids").read_text().split())


@pytest.fixture
def counts_once_rewarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An episode's seconds begin with its reward: on a busy machine a harness may start for longer than it has."""
    plain = EpisodeSession.own_s

    def own_s(self: EpisodeSession) -> float:
        if not self.rewarded:
            self.begin()
        return plain(self)

    monkeypatch.setattr(EpisodeSession, "own_s", own_s)


@pytest.mark.usefixtures("counts_once_rewarded")
def test_one_that_hangs_is_ended_when_its_seconds_are_used_up() -> None:
    sample = one(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); post('/episode/reward', {'reward': 0.5}); time.sleep(600)",
        timeout_s=1.0,
    )
    assert sample.status is Status.TRUNCATED and sample.numbers["truncated_by/time"] == 1.0 and sample.reward == 0.5


@pytest.mark.usefixtures("counts_once_rewarded")
def test_one_that_may_not_be_killed_costs_its_episode_and_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `sudo` may not, where the run is not root's."""

    def refused(*_: int) -> None:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(os, "killpg", refused)
        patched.setattr(os, "kill", refused)
        for name in ("TERM_S", "KILL_S"):
            patched.setattr(harness_process, name, 0.1)
        sample = one("post('/episode/reward', {'reward': 0.5}); time.sleep(600)", timeout_s=1.0)
    assert sample.status is Status.TRUNCATED and sample.reward == 0.5
    [pid] = marked()
    assert f"a harness could not be ended: of its processes stay {pid}" in caplog.text
    os.kill(pid, signal.SIGKILL)
    assert ended([pid])


def test_a_program_that_there_is_not_fails_the_episode() -> None:
    [sample] = harnessed(writing("5"), CommandHarness(("/no/such/program",), MODEL))
    assert "the harness ended: exit code 1" in sample.metadata["failure"]


def test_who_gives_an_episode_up_ends_its_harness() -> None:
    async def give_up(harnesses: Harnesses) -> None:
        while not marked():
            await asyncio.sleep(0.01)
        for task in asyncio.all_tasks():
            if "Harnesses.play" in repr(task.get_coro()):
                task.cancel()

    with pytest.raises(asyncio.CancelledError):
        harnessed(writing("5"), command("time.sleep(600)"), beside=give_up)


def test_no_proxy_is_asked_for_the_way_to_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "elsewhere.example")
    [sample] = harnessed(writing("42"), guess)
    assert sample.metadata.get("failure") is None and sample.reward == 1.0
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "elsewhere.example,127.0.0.1"


def test_a_function_may_give_whether_it_solved_its_row() -> None:
    async def solved(client: Any, row: EpisodeRow) -> bool:
        said = await client.chat.completions.create(model=MODEL, messages=list(row.messages))
        return said.choices[0].message.content is not None

    [sample] = harnessed(writing("5"), solved)
    assert sample.metadata.get("failure") is None and sample.reward == 1.0


def test_a_function_that_raises_or_gives_nonsense_costs_its_episode() -> None:
    async def raises(client: Any, row: EpisodeRow) -> None:
        raise KeyError("no such door")

    async def nonsense(client: Any, row: EpisodeRow) -> str:
        return "1.0"

    [raised] = harnessed(writing("5"), raises)
    assert "the harness raised KeyError: 'no such door'" in raised.metadata["failure"]
    assert "test_harness.py" in raised.metadata["trace"]
    [wrong] = harnessed(writing("5"), nonsense)
    assert "the harness gave a str; wanted is its reward" in wrong.metadata["failure"]


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (Done(1.0, None), "the harness gave None as metrics; wanted are numbers by name"),  # type: ignore[arg-type]
        (Done(1.0, {"a": "x"}), "the harness gave 'x' as the metric a"),  # type: ignore[dict-item]
        (10**400, "as a reward; wanted is a finite number"),
        (float("nan"), "the harness gave nan as a reward; wanted is a finite number"),
        (np.ones(2), "as a reward; wanted is a finite number"),
        (np.float32(0.5), None),
        (Done(np.float32(0.5), {"solved": np.int64(1)}), None),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_number_costs_its_episode_and_numbers_may_be_those_of_numpy(end: Any, says: str | None) -> None:
    async def ends(client: Any, row: EpisodeRow) -> Any:
        await client.chat.completions.create(model=MODEL, messages=list(row.messages))
        return end

    [sample] = harnessed(writing("5"), ends)
    assert (sample.reward == 0.5) if says is None else (says in sample.metadata["failure"])


def test_a_row_of_whole_numbers_beyond_64_bits_is_told() -> None:
    row = EpisodeRow("rows:1", (), "", {"big": 2**80, "list": [1]}, 3)
    assert json.loads(row_json(row))["fields"] == {"big": 2**80, "list": [1]}


async def whole(base_url: str, key: str, row: EpisodeRow) -> float:
    return 1.0


async def short(base_url: str) -> float:
    return 1.0


def plain(base_url: str, key: str, row: EpisodeRow) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ({"command": ["no-such-program"]}, "agent.command: there is no program 'no-such-program' to run"),
        ({"function": f"{HERE}:hole"}, "Did you mean 'whole'"),
        ({"function": f"{HERE}:plain"}, "it is no coroutine; wanted is `async def plain(base_url, key, row)`"),
        ({"function": f"{HERE}:short"}, "it cannot be called as `async def short(base_url, key, row)`"),
    ],
)
def test_what_cannot_play_is_refused_when_the_recipe_is_checked(
    tmp_path: Path, agent: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_agent(make_recipe(tmp_path, agent=agent), make_tokenizer("llama3"))
    assert says in str(caught.value)


def test_a_recipe_names_who_plays(tmp_path: Path) -> None:
    router = FakeSglang.__new__(FakeSglang)  # not asked
    script = {"command": [sys.executable, "x.py"], "processes": 5}
    for agent, most in ((script, 5), ({"function": f"{HERE}:whole", "listen": "node"}, None)):
        recipe = make_recipe(tmp_path, agent=agent)
        check_agent(recipe, make_tokenizer("llama3"))
        player = open_player(recipe, router, "127.0.0.2", TOKENIZER)  # type: ignore[arg-type]
        assert isinstance(player, Harnesses)
        assert player._settings.host == ("127.0.0.2" if "listen" in agent else "127.0.0.1")
        assert player._settings.most == most
