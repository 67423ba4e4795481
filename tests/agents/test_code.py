"""The environment `code`: programs are run with their row's tests, in real sandboxes, which episodes share."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.agents.environment import Done, EpisodeRow, Response, Turn
from megarl.agents.environments.code import NO_CODE, CodeWithTests, Trials
from megarl.agents.loading import Maker, check_environment
from megarl.core.errors import UserError, WorkerDiedError
from megarl.recipe.agent import Agent
from tests.agents.fake_policy import FakePolicy
from tests.agents.forms import ends_of, make_tokenizer
from tests.agents.playing import make_row, make_settings
from tests.agents.playing import play as play_episodes
from tests.support.processes import ended

END = ends_of("llama3")[0]

ADD = {"tests": {"inputs": ["1 2", "4 5", "0 0"], "outputs": ["3", "9", "0"]}}
DOUBLE = {"test_list": ["assert f(1) == 2", "assert f([1]) == [1, 1]"]}
RIGHT = "print(sum(map(int, input().split())))"
WRONG_FOR_ZERO = "a, b = map(int, input().split())\nprint(a + b or 'none')"


def block(code: str) -> str:
    return f"I think so:\n```python\n{code}\n```\n"


def row(fields: dict[str, Any]) -> EpisodeRow:
    return EpisodeRow("r:1", ({"role": "user", "content": "Add."},), "", fields, 1)


async def play(maker: Maker, fields: dict[str, Any], said: Sequence[str]) -> list[Turn | Done]:
    environment = maker()
    assert await environment.start(row(fields)) == [{"role": "user", "content": "Add."}]
    found = [await environment.step(Response(text, (), turn)) for turn, text in enumerate(said)]
    await environment.close()
    return found


def plays(episodes: Sequence[tuple[dict[str, Any], Sequence[str]]], **settings: Any) -> list[list[Turn | Done]]:
    """All at once, in the same sandboxes."""

    async def go() -> list[list[Turn | Done]]:
        maker = Maker(CodeWithTests, settings)
        try:
            return await asyncio.gather(*(play(maker, *episode) for episode in episodes))
        finally:
            await maker.close()

    return asyncio.run(go())


def text(turn: Turn | Done) -> str:
    assert isinstance(turn, Turn) and turn.reward == 0
    [message] = turn.messages
    return str(message["content"])


def test_a_program_is_mended_until_all_tests_pass() -> None:
    mended, checked = plays(
        [
            (ADD, ["I do not know.", block(WRONG_FOR_ZERO), block(RIGHT)]),
            (DOUBLE, [block("def f(x): raise KeyError('no')"), block("print('defined')\ndef f(x): return x * 2")]),
        ]
    )
    assert text(mended[0]) == NO_CODE
    assert text(mended[1]).startswith("2 of 3 tests pass. The program printed, in the first of them:\n3\n")
    assert mended[2] == Done(1.0, {"solved": 1.0, "tests_passed": 1.0, "tries": 3.0})
    # Asserts never show what they want.
    assert text(checked[0]).startswith("0 of 2 tests pass.") and "2\n" not in text(checked[0])
    assert checked[1] == Done(1.0, {"solved": 1.0, "tests_passed": 1.0, "tries": 2.0})


def test_what_a_program_raises_is_told() -> None:
    [[said, _]] = plays([(ADD, [block("raise KeyError('here')"), block(RIGHT)])])
    assert text(said).startswith("0 of 3") and "KeyError: 'here'" in text(said)


@pytest.mark.parametrize(("score", "worth"), [("all", 0.0), ("share", 2 / 3)])
def test_the_last_try_counts(score: str, worth: float) -> None:
    tries = [block(WRONG_FOR_ZERO)] * 2
    [[_, end]] = plays([(ADD, tries)], tries=2, score=score)
    assert isinstance(end, Done) and end.reward == pytest.approx(worth)
    assert end.metrics == {"solved": 0.0, "tests_passed": pytest.approx(2 / 3), "tries": 2.0}
    [[nothing]] = plays([(ADD, ["no code"])], tries=1, score=score)
    assert isinstance(nothing, Done) and nothing.reward == 0


def test_a_program_that_hangs_has_failed_its_tests_and_not_the_episode() -> None:
    """However long others wait for a sandbox meanwhile: the policy has to learn that it is worth nothing."""
    tokenizer = make_tokenizer("llama3")
    maker = Maker(CodeWithTests, {"sandboxes": 1, "timeout_s": 0.3, "tries": 1})
    fake = FakePolicy(lambda *_: [5, END], lambda _: block("while True: pass"), ends={END})
    settings = make_settings(maker, tokenizer, close=maker.close, step_timeout_s=1.0)
    samples = play_episodes(fake, settings, tokenizer, prompt=make_row("Add.", **ADD), indices=range(2))
    assert [(sample.metadata.get("failure"), sample.reward) for sample in samples] == [(None, 0.0)] * 2
    assert all(sample.numbers["by/tests_passed"] == 0.0 for sample in samples)


def test_a_row_without_tests_is_the_rows_fault() -> None:
    with pytest.raises(ValueError, match="the row has no tests"):
        plays([({}, [])])


def test_sandboxes_begin_with_the_first_program_and_begin_again() -> None:
    async def go() -> None:
        maker = Maker(CodeWithTests, {"sandboxes": 1})
        trials = maker._shared
        assert isinstance(trials, Trials) and trials._grader is None
        await play(maker, ADD, [block(RIGHT)])
        keeper = trials._grader._pool._pid()  # type: ignore[union-attr]
        assert keeper is not None
        os.kill(keeper, signal.SIGKILL)
        assert ended([keeper])
        with pytest.raises(WorkerDiedError):
            for _ in range(50):  # until the pool has heard of it
                await play(maker, ADD, [block(RIGHT)])
        [again] = await play(maker, ADD, [block(RIGHT)])
        assert isinstance(again, Done) and again.reward == 1
        second = trials._grader._pool._pid()  # type: ignore[union-attr]
        assert second is not None
        await maker.close()
        assert ended([second])

    asyncio.run(go())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tries": 0}, "tries=0"),
        ({"score": "some"}, "score='some'"),
        (
            {"trys": 2},
            "Did you mean tries? Its settings: tries, score, field, max_tests, timeout_s, memory_mb, sandboxes.",
        ),
        ({"memory_mb": 1}, "memory_mb"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        check_environment(Agent(environment="code", settings=settings))
    assert says in str(caught.value)


def test_what_is_shared_belongs_to_one_event_loop() -> None:
    with pytest.raises(UserError, match=r"agent\.workers: environments of code share .* Remove agent\.workers"):
        check_environment(Agent(environment="code", workers=2))


def test_a_recipe_is_refused_where_sandboxes_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from megarl.agents.python_sandbox import check_sandboxes

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"agent\.environment: code: .*apt install bubblewrap"):
        check_sandboxes(10.0, "agent.environment: code")
