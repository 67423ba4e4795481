from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from megarl.core.errors import MegarlError, UserError
from megarl.recipe.reward import Reward
from megarl.rewards.combine import Combined, Graders
from megarl.rewards.grade import Item
from tests.support.fake_graders import HANG, FakeGrader, FakeJudge, FakeRemote

T = TypeVar("T")
KEY = "secret-of-the-test"


def reward_of(remote: str = "", judge: str = "", **keys: Any) -> Reward:
    """A rule with weight 1, a remote with 0.5 and a judge with -0.25: those that have an address."""
    common = {"timeout_s": 5.0, "retries": 0, **keys}
    graders: dict[str, Any] = {"right": {"kind": "rule", "fn": "exact"}}
    if remote:
        graders["long"] = {"kind": "remote", "url": remote, "weight": 0.5, **common}
    if judge:
        graders["rude"] = {"kind": "judge", "url": judge, "weight": -0.25, "model": "m", **common}
    return Reward.model_validate({"graders": graders})


def talk(remote: FakeRemote, judge: FakeJudge, call: Callable[[Graders], Awaitable[T]], **keys: Any) -> T:
    async def go() -> T:
        async with remote, judge:
            graders = Graders.open(reward_of(remote.url, judge.url, **keys))
            try:
                await graders.start()
                return await call(graders)
            finally:
                await graders.close()

    return asyncio.run(go())


def made() -> tuple[FakeRemote, FakeJudge]:
    """A remote that gives 0.1 a character, and a judge that gives 8 of 10."""
    return FakeRemote(score=lambda item: len(item["response"]) / 10), FakeJudge(reply=lambda _: "Score: 8")


def test_the_reward_is_the_weighted_sum_of_what_all_say() -> None:
    right, wrong = talk(
        *made(), lambda g: asyncio.gather(g.grade(Item("", "42", "42")), g.grade(Item("", "4200", "42")))
    )
    assert right == Combined(pytest.approx(1 + 0.5 * 0.2 - 0.25 * 0.8), {"right": 1.0, "long": 0.2, "rude": 0.8}, None)
    assert wrong == Combined(pytest.approx(0.5 * 0.4 - 0.25 * 0.8), {"right": 0.0, "long": 0.4, "rude": 0.8}, None)


def test_figures_have_the_names_of_their_graders() -> None:
    remote = FakeRemote(score=lambda item: {"score": 0.5, "acc": 1, "why": "short"})
    [found] = talk(remote, made()[1], lambda g: asyncio.gather(g.grade(Item("", "42", "42"))))
    assert found.parts == {"right": 1.0, "long": 0.5, "rude": 0.8} and found.failure is None
    assert found.figures == {"reward/by/long/acc": 1.0}


def test_who_does_not_grade_a_row_is_not_asked_and_counts_nothing() -> None:
    """The judge would fail at it."""
    remote, judge = FakeRemote(score=lambda item: 0.5), FakeJudge(reply=lambda _: "Hm.")

    async def call(graders: Graders) -> list[Combined]:
        return [await graders.grade(Item("", "42", "42", {"source": source})) for source in ("math", "chat")]

    math, chat = talk(remote, judge, call, only={"source": "math"})
    assert math.parts == {"right": 1.0, "long": 0.5, "rude": None} and math.failure is not None
    assert chat == Combined(1.0, {"right": 1.0}, None)


def test_what_an_episode_says_beside_its_row_chooses_no_grader() -> None:
    """Rows are looked at before the start: an environment that says `source` as well would leave its row without a reward."""
    told: list[Any] = []
    remote = FakeRemote(score=lambda item: told.append(item["metadata"]) or 0.5)

    async def call(graders: Graders) -> Combined:
        return await graders.grade(Item("", "42", "42", {"source": "shop"}, "row"), {"source": "math"})

    found = talk(remote, made()[1], call, only={"source": "math"})
    assert found.parts == {"right": 1.0, "long": 0.5, "rude": 0.8}
    assert told == [{"source": "shop"}], "graders get all that there is"


def test_one_that_fails_leaves_no_reward_and_keeps_what_the_others_say() -> None:
    def score(item: dict[str, Any]) -> Any:
        return None if "null" in item["response"] else 0.5

    remote, judge = FakeRemote(score=score), FakeJudge(reply=lambda q: "Hm." if "dunno" in q else "Score: 10")

    async def call(graders: Graders) -> list[Combined]:
        return [await graders.grade(Item("", response, "42")) for response in ("42", "null", "dunno null", "42")]

    good, one, two, again = talk(remote, judge, call)
    assert good == again == Combined(1.0, {"right": 1.0, "long": 0.5, "rude": 1.0}, None)
    assert one == Combined(0.0, {"right": 0.0, "long": None, "rude": 1.0}, "long: not a number: None")
    assert two.parts == {"right": 0.0, "long": None, "rude": None}
    assert two.failure == "long: not a number: None; rude: no score: the judge replied 'Hm.'"


def test_the_first_failure_of_each_grader_is_told_at_once() -> None:
    told: list[str] = []
    remote = FakeRemote(score=lambda item: None if "null" in item["response"] else 0.5)

    async def go() -> None:
        async with remote:
            graders = Graders.open(reward_of(remote.url), told.append)
            await graders.start()
            for row, response in enumerate(("4", "null", "null", "4")):
                await graders.grade(Item("", response, "4", {}, f"rows.jsonl:{row}"))
            await graders.close()

    asyncio.run(go())
    assert told == ["the grader long (remote) failed at a response to rows.jsonl:1: not a number: None"]


def test_all_grade_at_the_same_time() -> None:
    # Each server holds its first response, after the start's call, until the other has one as well.
    both = asyncio.Barrier(2)
    combined = talk(FakeRemote(None, both), FakeJudge(None, both), lambda g: g.grade(Item("", "42", "42")))
    assert combined.failure is None


def test_who_is_not_there_at_the_start_is_named_with_all_the_others() -> None:
    with pytest.raises(MegarlError) as caught:
        talk(FakeRemote((401, f"no key {KEY}")), FakeJudge(HANG), lambda g: g.start(), timeout_s=1.0)
    text = str(caught.value)
    assert "long (remote): error: http://127.0.0.1" in text and "answered 401: no key" in text
    assert "rude (judge): timeout: no answer from http://127.0.0.1" in text
    assert "correct url and key_env in reward.graders" in text


def test_a_rule_that_cannot_start_is_the_users_error_and_the_others_are_closed() -> None:
    reward = Reward.model_validate({"graders": {"own": {"kind": "rule", "fn": "math:sqroot"}}})

    async def go() -> None:
        await Graders.open(reward).start()

    with pytest.raises(UserError, match=r"reward\.graders\.own\.fn='math:sqroot'.*Did you mean 'sqrt'"):
        asyncio.run(go())


def test_the_short_form_is_one_rule_by_the_name_of_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go(fn: str, response: str) -> Combined:
        graders = Graders.open(Reward(fn=fn))
        try:
            await graders.start()
            return await graders.grade(Item("", response, "aaaa"))
        finally:
            await graders.close()

    monkeypatch.chdir(Path(__file__).parent)
    assert asyncio.run(go("exact", "aaaa")) == Combined(1.0, {"exact": 1.0}, None)
    failed = asyncio.run(go("grading:naughty", "raise"))
    assert (failed.reward, failed.parts) == (0.0, {"naughty": None})
    assert str(failed.failure).startswith("naughty: error: ValueError: boom (grading.py, line ")


def test_the_key_goes_to_the_servers_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRADERS_KEY", f"{KEY}\n")
    remote, judge = FakeRemote(None, (403, f"{KEY} may not")), FakeJudge()
    with caplog.at_level(0):
        combined = talk(remote, judge, lambda g: g.grade(Item("", "", "")), key_env="GRADERS_KEY")
    fakes: tuple[FakeGrader, ...] = (remote, judge)
    assert [set(fake.keys) for fake in fakes] == [{f"Bearer {KEY}"}] * 2
    assert combined.failure is not None and "403: [hidden] may not" in combined.failure
    assert KEY not in caplog.text and KEY not in repr(combined)
    assert KEY not in repr(reward_of(remote.url, judge.url, key_env="GRADERS_KEY"))


@pytest.mark.parametrize("which", ["rule", "remote", "judge"])
def test_a_grader_that_hangs_is_told_of_while_it_does(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setattr("megarl.rewards.combine.LOOK_S", 0.05)
    monkeypatch.setattr("megarl.rewards.combine.LONG_LEAST_S", 0.3)

    async def go() -> list[str]:
        told: asyncio.Queue[str] = asyncio.Queue()
        async with FakeRemote(None, HANG) as remote, FakeJudge(None, HANG) as judge:
            http = {"timeout_s": 3.0, "retries": 0}
            settings = {
                "rule": {"kind": "rule", "fn": "grading:naughty"},
                "remote": {"kind": "remote", "url": remote.url, **http},
                "judge": {"kind": "judge", "url": judge.url, "model": "m", **http},
            }
            reward = Reward.model_validate({"timeout_s": 3.0, "graders": {"mine": settings[which]}})
            graders = Graders.open(reward, told.put_nowait)
            await graders.start()
            grading = asyncio.create_task(graders.grade(Item("", "hang", "", {}, "train.jsonl:17")))
            line = await told.get()
            assert not grading.done(), "it is told of while it hangs"
            assert ((await grading).failure or "").startswith("mine: timeout")
            await graders.close()
            return [line, *(told.get_nowait() for _ in range(told.qsize()))]

    line, failed = asyncio.run(go())
    assert failed.startswith(f"the grader mine ({which}) failed at a response to train.jsonl:17: timeout")
    begins = re.escape(f"the grader mine ({which}) has been at a response to train.jsonl:17 for ")
    assert re.fullmatch(rf"{begins}[0-3] s; its deadline is 3 s", line)


def test_servers_that_were_there_before_are_waited_for_at_the_start() -> None:
    async def go() -> tuple[int, int]:
        busy = [(503, "loading")]
        async with FakeRemote(*busy) as remote, FakeJudge(*busy) as judge:
            graders = Graders.open(reward_of(remote.url, judge.url), known=True)
            try:
                await graders.start()
            finally:
                await graders.close()
            return len(remote.bodies), len(judge.bodies)

    assert asyncio.run(go()) == (2, 2)


def test_what_waits_for_a_server_that_hangs_is_given_up() -> None:
    remote, judge = FakeRemote(None, *[HANG] * 99), FakeJudge(None, *[HANG] * 99)
    common = {"concurrency": 3, "timeout_s": 2.0}

    async def call(graders: Graders) -> list[Combined]:
        return await asyncio.gather(*(graders.grade(Item("", "1", "2", {}, f"row {index}")) for index in range(40)))

    graded = talk(remote, judge, call, **common)
    # One at the start, three at the same time, and at most one in the place of each of these before all have timed out.
    assert 4 <= len(judge.bodies) <= 7
    assert sum("grades in a row were lost before it" in str(each.failure) for each in graded) >= 34
