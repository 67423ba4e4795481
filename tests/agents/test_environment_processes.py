"""Environments in worker processes: they may block, and what breaks there costs its own episodes alone."""

from __future__ import annotations

import asyncio
import pickle
import queue
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.agents import environment_processes, environment_worker, patience
from megarl.agents.environment import Done, EnvironmentFailedError, EpisodeRow, Response
from megarl.agents.environment_processes import EnvironmentProcesses, _Process
from megarl.agents.environment_wire import Answer, Call
from megarl.agents.environment_worker import _Worker
from megarl.agents.environments.guess_number import GuessNumber
from megarl.agents.player import open_player
from megarl.core.types import Sample, Status
from megarl.recipe.agent import Agent
from tests.agents.endpoint.harnesses import TOKENIZER, writing
from tests.agents.endpoint.test_session import TURNS, same
from tests.agents.playing import LONG_S, make_settings, play
from tests.rollout.test_collector import make_recipe
from tests.support.fake_sglang import FakeSglang
from tests.support.processes import ended

ROW = EpisodeRow("rows.jsonl:1", ({"role": "user", "content": "Go."},), "", {}, 1)


def played(
    environment: str, settings: dict[str, Any], *turns: str, workers: int, episodes: int = 1, **changes: Any
) -> list[Sample]:
    processes = EnvironmentProcesses(Agent(environment=environment, settings=settings, workers=workers))  # type: ignore[arg-type]
    told = make_settings(GuessNumber, TOKENIZER, processes=processes, **changes)
    samples = play(writing(*turns), told, TOKENIZER, indices=range(episodes))
    assert ended(process._process.pid for process in processes._workers if process is not None)
    return samples


def blocking(
    folder: Path, *, workers: int, episodes: int, together: int = 1, wrong: str = "", **changes: Any
) -> list[Sample]:
    settings = {"folder": str(folder), "together": together, "wrong": wrong}
    return played("tests.agents.blocking:Blocking", settings, "5", workers=workers, episodes=episodes, **changes)


def test_a_game_leaves_the_same_sample_as_on_the_event_loop() -> None:
    [own] = play(writing(*TURNS), make_settings(GuessNumber, TOKENIZER), TOKENIZER)
    [theirs] = played("guess_number", {"low": 0, "high": 99}, *TURNS, workers=1)
    same(own, theirs)


def test_all_that_block_do_so_side_by_side_in_as_many_processes(tmp_path: Path) -> None:
    """Six episodes wait for each other within calls that block, in two processes."""
    samples = blocking(tmp_path, workers=2, episodes=6, together=6)
    assert [(sample.status, sample.reward) for sample in samples] == [(Status.COMPLETED, 1.5)] * 6
    pids = [sample.numbers["by/pid"] for sample in samples]
    assert sorted(map(pids.count, pids)) == [3] * 6
    assert len([*tmp_path.glob("close-*")]) == 6


def test_one_too_many_costs_itself_and_not_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a thread and open files, of which a process may have so many."""

    def no_more() -> None:
        raise OSError(24, "Too many open files")

    said: queue.Queue[Answer] = queue.Queue()
    worker = _Worker(GuessNumber, said.put)
    worker.take(Call(0, 0, "start", (ROW,)))
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "new_event_loop", no_more)
        worker.take(Call(1, 1, "start", (ROW,)))
    worker.take(Call(2, 1, "close"))
    answers = {answer.number: answer for answer in (said.get(timeout=20) for _ in range(3))}
    assert answers[1].error == "OSError: [Errno 24] Too many open files: its process has 1 of them"
    assert answers[0].error == answers[2].error == ""
    worker.take(Call(3, 0, "close"))
    assert said.get(timeout=20) == Answer(3, pickle.dumps(None))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("raise", "step raised KeyError: 'no such door'"),
        ("raise without words", "step raised Speechless, which has no words"),
        ("exit", "step raised RuntimeError: it exits (3)"),
        ("hang", "step did not end within 3 s"),
        ("unpicklable", "what it gave cannot leave its process"),
    ],
)
def test_what_goes_wrong_there_costs_its_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, says: str
) -> None:
    monkeypatch.setattr(patience, "GRACE_S", 0.1)
    step_timeout_s = 3.0 if wrong == "hang" else LONG_S
    [sample] = blocking(tmp_path, workers=1, episodes=1, wrong=wrong, step_timeout_s=step_timeout_s)
    assert sample.status is Status.FAILED and sample.numbers == {"environment_failures": 1.0}
    assert sample.metadata["failure"].startswith("the environment failed: ") and says in sample.metadata["failure"]
    if wrong == "raise":
        assert "blocking.py" in sample.metadata["trace"]
    assert len([*tmp_path.glob("close-*")]) == (wrong != "hang")  # its thread is still in there


@pytest.mark.parametrize("wrong", ["die", "fork and die"])
def test_a_process_that_dies_costs_its_episodes_and_is_there_again(tmp_path: Path, wrong: str) -> None:
    """The first to get there kills the process; whoever begins after that has another. A child of it may hold its socket."""

    async def go() -> list[Any]:
        processes = EnvironmentProcesses(
            Agent(
                environment="tests.agents.blocking:Blocking",
                settings={"folder": str(tmp_path), "wrong": wrong},
                workers=1,
            )
        )
        found: list[Any] = []
        try:
            await processes.make().ready()
            for _ in range(2):
                first, beside = processes.make(), processes.make()
                for each in (first, beside):
                    await each.start(ROW)
                try:
                    found.append(await first.step(Response("5", (5,), 1)))
                except EnvironmentFailedError as error:
                    found.append(str(error))
                    with pytest.raises(EnvironmentFailedError, match="its process ended: signal SIGKILL"):
                        await beside.step(Response("5", (5,), 0))
                await first.close()
                await processes.make().ready()
        finally:
            await processes.close()
        return found

    died, done = asyncio.run(asyncio.wait_for(go(), 300))
    assert died == "its process ended: signal SIGKILL" and isinstance(done, Done) and done.reward == 1.0


def test_a_process_that_does_not_start_costs_its_own_episodes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, start = [True, False, False], _Process.start

    async def started(arguments: tuple[str, ...]) -> _Process:
        if starts.pop(0):
            return await start(arguments)
        raise EnvironmentFailedError("an environments' process did not start")

    monkeypatch.setattr(_Process, "start", started)
    samples = blocking(tmp_path, workers=2, episodes=4)
    assert sorted(sample.status.name for sample in samples) == ["COMPLETED", "COMPLETED", "FAILED", "FAILED"]
    assert {sample.metadata.get("failure") for sample in samples} == {
        None,
        "the environment failed: an environments' process did not start",
    }


def test_one_that_ends_in_time_by_itself_has_no_deadline_there_either(tmp_path: Path) -> None:
    settings = {"folder": str(tmp_path), "wrong": "linger", "linger_s": 4.0}
    [sample] = played("tests.agents.blocking:Timed", settings, "5", workers=1, step_timeout_s=3.0)
    assert (sample.status, sample.reward) == (Status.COMPLETED, 1.5)


def in_one_process(folder: Path, wrong: str, work: Callable[[EnvironmentProcesses], Awaitable[None]]) -> None:
    async def go() -> None:
        settings = {"folder": str(folder), "wrong": wrong}
        processes = EnvironmentProcesses(
            Agent(environment="tests.agents.blocking:Blocking", settings=settings, workers=1)
        )
        try:
            await processes.make().ready()
            await work(processes)
        finally:
            await processes.close()

    asyncio.run(asyncio.wait_for(go(), 300))


def test_one_that_blocks_for_longer_than_anybody_waits_closes_once_it_has_its_thread_back(tmp_path: Path) -> None:
    async def lingers(processes: EnvironmentProcesses) -> None:
        made = processes.make()
        await made.start(ROW)
        for call in (lambda: made.step(Response("5", (5,), 1)), made.close):
            with pytest.raises(EnvironmentFailedError, match="did not end within"):
                await patience.within(call, 0.2, "it")
        assert not [*tmp_path.glob("close-*")]
        while not [*tmp_path.glob("close-*")]:
            await asyncio.sleep(0.02)

    in_one_process(tmp_path, "linger", lingers)


def test_an_answer_that_is_too_large_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images come so: what an environment shows at once is bounded before anybody reads it."""
    monkeypatch.setattr(environment_worker, "MOST_BYTES", 100)
    said: queue.Queue[Answer] = queue.Queue()
    worker = _Worker(GuessNumber, said.put)
    worker.take(Call(0, 0, "start", (replace(ROW, messages=({"role": "user", "content": "x" * 200},)),)))
    answer = said.get(timeout=20)
    assert answer.value == b"" and "bytes, and 100 at most leave its process" in answer.error
    worker.take(Call(1, 0, "close"))
    assert said.get(timeout=20).error == ""


def test_a_process_that_sends_more_than_any_answer_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def sends(processes: EnvironmentProcesses) -> None:
        monkeypatch.setattr(environment_processes, "MOST_FRAME", 50)
        with pytest.raises(EnvironmentFailedError, match="its process ended"):
            await processes.make().start(ROW)
        assert "would send" in caplog.text

    in_one_process(tmp_path, "", sends)


def test_environments_that_have_closed_hold_no_files(tmp_path: Path) -> None:
    async def count(processes: EnvironmentProcesses) -> None:
        process = processes._workers[0]
        assert process is not None
        files = Path(f"/proc/{process._process.pid}/fd")
        before = len([*files.iterdir()])
        made = [processes.make() for _ in range(20)]
        for each in made:
            await each.start(ROW)
        for each in made:
            await each.close()
        while len([*files.iterdir()]) > before:
            await asyncio.sleep(0.02)

    in_one_process(tmp_path, "", count)


def test_a_recipe_names_how_many(tmp_path: Path) -> None:
    router = FakeSglang.__new__(FakeSglang)  # not asked
    for workers in (None, 3):
        recipe = make_recipe(tmp_path, agent={"environment": "guess_number", "workers": workers})
        processes = open_player(recipe, router, "127.0.0.1", TOKENIZER)._settings.processes  # type: ignore[attr-defined, arg-type]
        assert (processes and len(processes._workers)) == workers
