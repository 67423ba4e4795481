"""Episodes end as they should: done, out of a budget, cut off, cancelled, or failed by what an environment does wrong."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.agents import episode, patience
from megarl.agents.environment import Done, EpisodeRow, Message, Response, Turn
from megarl.agents.episode import Episodes
from megarl.agents.template import QUICK, ChatTemplate
from megarl.core.types import Sample, Status
from megarl.data.prompts import MESSAGES_KEY
from megarl.data.spelled import Spelled
from megarl.rollout import asking
from megarl.rollout.asking import Asker
from megarl.rollout.attempt import Attempt
from megarl.rollout.gate import Gate
from megarl.rollout.seeds import environment_seed, request_seed
from megarl.serving.client import ServerClient
from megarl.serving.sampling import Sampling
from tests.agents.blocking import Speechless
from tests.agents.fake_policy import FakePolicy
from tests.agents.forms import ends_of, make_tokenizer
from tests.agents.playing import make_row, make_settings, play

TOKENIZER = make_tokenizer("qwen3")
END = ends_of("qwen3")[0]
TOLD = 10  # tokens between two turns: "\n", "<|im_start|>", "user", "\n", "a", "<|im_end|>", and what opens the next


def policy(turn: list[int] | None = None, **changes: Any) -> FakePolicy:
    ids = [5, END] if turn is None else turn
    return FakePolicy(
        lambda *_: ids, lambda ids: TOKENIZER.decode(ids, skip_special_tokens=True), ends={END}, **changes
    )


class Counting:
    """Goes on for so many turns; each is worth 0.5, the last 1. What happens in it is noted."""

    made: list[Counting]

    def __init__(self, turns: int = 3) -> None:
        self.turns, self.closed, self.rows = turns, 0, list[EpisodeRow]()
        self.responses: list[Response] = []
        type(self).made = [*getattr(type(self), "made", []), self]

    async def start(self, row: EpisodeRow) -> Any:
        self.rows.append(row)
        return list(row.messages)

    async def step(self, response: Response) -> Any:
        self.responses.append(response)
        return (
            Done(1.0, {"solved": 1.0})
            if response.turn + 1 == self.turns
            else Turn([{"role": "user", "content": "a"}], 0.5)
        )

    async def close(self) -> None:
        self.closed += 1


def counting(turns: int = 3) -> type[Counting]:
    """A class of its own, that knows those made of it."""
    return type("Counting", (Counting,), {"made": [], "__init__": lambda self: Counting.__init__(self, turns)})


def test_an_episode_is_done_when_its_environment_says_so() -> None:
    made = counting()
    fake = policy()
    [sample] = play(fake, make_settings(made, TOKENIZER), TOKENIZER, prompt=make_row("Guess.", level=3))
    assert sample.status is Status.COMPLETED
    assert (sample.reward, sample.metadata["turn_rewards"]) == (2.0, [0.5, 0.5, 1.0])
    [environment] = made.made
    assert environment.closed == 1
    [row] = environment.rows
    assert (row.id, row.answer, row.fields, row.messages[0]["content"]) == (
        "rows.jsonl:1",
        "42",
        {"level": 3},
        "Guess.",
    )
    assert row.seed == environment_seed(1, "train", 3, row.id)
    assert [(each.turn, each.token_ids, each.text) for each in environment.responses] == [
        (turn, (5, END), TOKENIZER.decode([5])) for turn in range(3)
    ]
    numbers = {name: value for name, value in sample.numbers.items() if not name.endswith("_s")}
    assert numbers == {
        "turns": 3.0,
        "policy_tokens": 6.0,
        "environment_tokens": 2.0 * TOLD,
        "environment_failures": 0.0,
        "truncated_by/turns": 0.0,
        "truncated_by/tokens": 0.0,
        "truncated_by/time": 0.0,
        "by/solved": 1.0,
    }
    # The first turn draws what a single response would, those after it have numbers of their own.
    seeds = [body["sampling_params"]["sampling_seed"] for body in fake.bodies("/generate")]
    assert seeds == [request_seed(1, "train", 3, row.id, 0, turn) for turn in range(3)] and len(set(seeds)) == 3
    assert seeds[0] == request_seed(1, "train", 3, row.id, 0)


def test_a_turn_that_is_to_be_the_same_bits_takes_nothing_from_the_cache_of_the_turn_before() -> None:
    """A server may have it or not: it may be another one, or have died since."""
    fake = policy()
    play(fake, make_settings(counting(), TOKENIZER), TOKENIZER, sampling=Sampling(1000, alone=True), indices=(0, 1))
    first, second, third = (
        {body["extra_key"] for body in fake.bodies("/generate")[at : at + 2]} for at in range(0, 6, 2)
    )
    assert len(first) == len(second) == len(third) == 1, "the two episodes, which say the same, share what they have"
    assert len(first | second | third) == 3


@pytest.mark.parametrize(
    ("changes", "most", "over", "turns"),
    [
        ({"max_turns": 2}, 1000, "turns", 2),
        ({}, 2 + TOLD + 1, "tokens", 2),  # one token is left for the second turn, which does not end with it
        ({}, 2 + TOLD, "tokens", 1),  # after what the environment says nothing is left
        ({"turn_tokens": 1}, 1000, "tokens", 1),
    ],
)
def test_a_budget_that_runs_out_truncates_the_episode(
    changes: dict[str, Any], most: int, over: str, turns: int
) -> None:
    made = counting(100)
    [sample] = play(policy(), make_settings(made, TOKENIZER, **changes), TOKENIZER, sampling=Sampling(most))
    assert sample.status is Status.TRUNCATED
    assert {name for name, value in sample.numbers.items() if name.startswith("truncated") and value} == {
        f"truncated_by/{over}"
    }
    assert sample.numbers["turns"] == turns
    # What the environment said last is not in it: nothing follows.
    assert sample.loss_mask[-1] == 1 and len(sample.response_ids) <= most
    cut = over == "tokens" and (most == 2 + TOLD + 1 or "turn_tokens" in changes)
    assert sample.reward == 0.5 * (turns - cut)
    assert made.made[0].closed == 1


def test_what_is_far_too_long_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool may give gigabytes: all other episodes of the process would stand still for minutes."""
    encode = Spelled.encode

    def short_ones(self: Spelled, text: str) -> Any:
        assert len(text) < QUICK
        return encode(self, text)

    monkeypatch.setattr(Spelled, "encode", short_ones)
    long = [{"role": "user", "content": "a" * (QUICK + 1)}]
    made = type("Long", (Bad,), {"__init__": lambda self: Bad.__init__(self, "step", lambda: Turn(long))})
    [sample] = play(policy(), make_settings(made, TOKENIZER), TOKENIZER, sampling=Sampling(1000))
    assert sample.status is Status.TRUNCATED and sample.numbers["truncated_by/tokens"] == 1.0
    made = type("Long", (Bad,), {"__init__": lambda self: Bad.__init__(self, "start", lambda: long)})
    [sample] = play(policy(), make_settings(made, TOKENIZER), TOKENIZER)
    assert "start gave messages far over data.max_prompt_tokens=1000" in sample.metadata["failure"]
    # Within the budget it is only long.
    assert not ChatTemplate(TOKENIZER).exceeds(long, QUICK)


@pytest.mark.parametrize(("timeout_s", "turns"), [(3.9, 1), (4.1, 2), (8.1, 3), (20.1, 5)])
def test_seconds_that_run_out_truncate_the_episode(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, turns: int
) -> None:
    """Each step of the environment takes 4 s of a clock that nothing else moves; the fifth is the end."""
    clock = 0.0
    for module in (episode, asking):  # seconds at the servers count, too
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock))

    class Slow(Counting):
        async def step(self, response: Response) -> Any:
            nonlocal clock
            clock += 4.0
            return await super().step(response)

    made = type("Slow", (Slow,), {"made": [], "__init__": lambda self: Counting.__init__(self, 5)})
    [sample] = play(policy(), make_settings(made, TOKENIZER, timeout_s=timeout_s), TOKENIZER)
    over = timeout_s < 20
    assert sample.status is (Status.TRUNCATED if over else Status.COMPLETED)
    assert sample.numbers["truncated_by/time"] == over and sample.numbers["turns"] == turns
    assert sample.reward == 0.5 * turns + 0.5 * (not over)
    assert sample.loss_mask[-1] == 1 and made.made[0].closed == 1


class Bad(Counting):
    """Does one thing wrong, at its second turn or where else it is told to."""

    def __init__(self, where: str, wrong: Callable[[], Any]) -> None:
        super().__init__()
        self.where, self.wrong = where, wrong

    async def start(self, row: EpisodeRow) -> Any:
        return await self._at("start") or await super().start(row)

    async def step(self, response: Response) -> Any:
        return (response.turn and await self._at("step")) or await super().step(response)

    async def close(self) -> None:
        await super().close()
        await self._at("close")

    async def _at(self, where: str) -> Any:
        if where != self.where:
            return None
        found = self.wrong()
        return await found if asyncio.iscoroutine(found) else found


def raises() -> Any:
    raise KeyError("no such door")


async def hangs() -> None:
    await asyncio.sleep(60)


async def hangs_for_good() -> None:
    """Does not heed its cancellation."""
    end = time.monotonic() + 3
    while time.monotonic() < end:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue


class Unspeakable:
    def __repr__(self) -> str:
        raise ValueError("no words for it")


def raises_without_words() -> Any:
    raise Speechless


def interrupts() -> Any:
    raise KeyboardInterrupt


async def cancels_itself() -> None:
    raise asyncio.CancelledError


def fails(where: str, wrong: Callable[[], Any]) -> tuple[Sample, Bad]:
    made: list[Bad] = []

    def make() -> Bad:
        made.append(Bad(where, wrong))
        return made[-1]

    fake = policy()
    [sample] = play(fake, make_settings(make, TOKENIZER, step_timeout_s=0.1), TOKENIZER)
    return sample, made[0]


@pytest.mark.parametrize(
    ("where", "wrong", "reason"),
    [
        ("start", raises, "start raised KeyError: 'no such door'"),
        ("step", raises, "step raised KeyError: 'no such door'"),
        ("step", lambda: sys.exit(3), "step raised RuntimeError: it exits (3)"),
        ("start", hangs, "start did not end within 0.1 s"),
        ("step", hangs, "step did not end within 0.1 s"),
        ("step", cancels_itself, "step was cancelled by itself"),
        ("start", lambda: "Guess!", "start gave 'Guess!'; wanted is a list of messages"),
        ("start", lambda: [{"role": "user"}], "start gave as message 1 {'role': 'user'}; wanted"),
        ("start", lambda: [{"role": "assistant", "content": "5"}], "end with the assistant's"),
        ("start", lambda: [{"role": "usr", "content": "5"}], "there is no role 'usr'"),
        ("start", lambda: [{"role": "user", "content": "5" * 2000}], "tokens, over data.max_prompt_tokens=1000"),
        ("step", lambda: "lower", "step gave 'lower'; wanted is a Turn"),
        ("step", lambda: Turn([]), "step gave []; wanted is a list of messages"),
        ("step", lambda: Turn([{"role": "assistant", "content": "x"}]), "only the policy writes these"),
        ("step", lambda: Done(float("nan")), "step gave nan as a reward; wanted is a finite number"),
        ("step", lambda: Done(1.0, {"a b": 1.0}), "a metric 'a b'"),
        ("step", lambda: Done(1.0, {"a": "x"}), "step gave 'x' as the metric a"),
        ("step", lambda: Done(1.0, None), "step gave None as metrics; wanted are numbers by name"),  # type: ignore[arg-type]
        ("step", lambda: Done(10**400), "as a reward; wanted is a finite number"),
        ("step", lambda: Done(1e39), "step gave 1e+39 as a reward; wanted is a finite number, of at most 1e+30"),
        ("step", Unspeakable, "step raised ValueError: no words for it"),
        ("step", raises_without_words, "step raised Speechless, which has no words"),
        ("step", interrupts, "step raised RuntimeError: it exits"),
    ],
)
def test_what_an_environment_does_wrong_costs_its_episode_alone(where: str, wrong: Any, reason: str) -> None:
    sample, environment = fails(where, wrong)
    assert sample.status is Status.FAILED
    assert sample.metadata["failure"].startswith("the environment failed: ") and reason in sample.metadata["failure"]
    assert environment.closed == 1
    assert sample.numbers == {"environment_failures": 1.0}
    assert len(sample.response_ids) == 0
    if wrong is raises:
        assert "test_episode.py" in sample.metadata["trace"] and sample.metadata["trace"].endswith("'no such door'\n")
    if where == "step":  # how far it was can be read
        assert [message["role"] for message in sample.metadata["messages"]] == [
            "user",
            "assistant",
            "user",
            "assistant",
        ]


def test_a_comparison_is_a_reward_as_it_is_for_graders() -> None:
    sample, _ = fails("step", lambda: Done(True, {"solved": np.bool_(True)}))  # type: ignore[dict-item]
    assert sample.metadata.get("failure") is None
    reward = sample.metadata["turn_rewards"][-1]
    assert type(reward) is float and (reward, sample.numbers["by/solved"]) == (1.0, 1.0)


@pytest.mark.parametrize("number", [np.float32, np.int64, np.float64])
def test_numbers_may_be_those_of_numpy(number: Callable[[float], Any]) -> None:
    sample, _ = fails("step", lambda: Done(number(2), {"solved": number(1)}))
    assert sample.metadata.get("failure") is None
    assert (sample.metadata["turn_rewards"][-1], sample.numbers["by/solved"]) == (2.0, 1.0)


def test_half_a_character_is_told_as_a_question_mark() -> None:
    """Such as in names of files that are no UTF-8: no tokenizer takes it."""
    sample, _ = fails("step", lambda: Turn([{"role": "user", "content": "a\ud800b"}]))
    assert sample.metadata.get("failure") is None and "a?b" in sample.response_text
    sample, _ = fails("start", lambda: [{"role": "user", "content": "\ud800c"}])
    assert sample.metadata.get("failure") is None and "?c" in sample.prompt.text


def test_what_environments_share_may_fail_to_close() -> None:
    """It is a user's, and what else episodes hold is closed all the same."""
    closed: list[str] = []

    async def fails_to() -> None:
        raise KeyError("no such door")

    class Tools:
        async def close(self) -> None:
            closed.append("tools")

    settings = make_settings(counting(), TOKENIZER, close=fails_to, tools=Tools())
    asyncio.run(Episodes(settings).close())
    assert closed == ["tools"]


def test_an_environment_that_does_not_heed_its_end_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "GRACE_S", 0.1)
    began = time.monotonic()
    sample, environment = fails("step", hangs_for_good)
    assert "step did not end within 0.1 s" in sample.metadata["failure"] and environment.closed == 1
    assert time.monotonic() - began < 60


def test_a_constructor_that_raises_fails_the_episode() -> None:
    [sample] = play(policy(), make_settings(raises, TOKENIZER), TOKENIZER)
    assert "start raised KeyError" in sample.metadata["failure"]


@pytest.mark.parametrize("wrong", [raises, hangs])
def test_what_goes_wrong_in_close_costs_nothing(wrong: Any, caplog: pytest.LogCaptureFixture) -> None:
    sample, _ = fails("close", wrong)
    assert sample.status is Status.COMPLETED
    assert "the environment failed: close " in caplog.text


def test_one_that_fails_takes_no_other_with_it() -> None:
    turn = iter(range(100))

    def make() -> Counting:
        return Bad("step", raises) if next(turn) == 1 else Bad("nowhere", raises)

    samples = play(policy(), make_settings(make, TOKENIZER), TOKENIZER, indices=range(4))
    assert [sample.status for sample in samples].count(Status.FAILED) == 1
    assert len({sample.id for sample in samples}) == 4


def test_a_server_that_aborts_in_the_middle_of_turns_loses_nothing() -> None:
    made = counting(4)
    fake = policy([5, 6, 7, END], cut=0.6)
    [sample] = play(fake, make_settings(made, TOKENIZER), TOKENIZER)
    assert any(cut for *_, cut in fake.turns)
    assert sample.status is Status.COMPLETED and sample.numbers["turns"] == 4


def test_a_server_that_never_answers_fails_the_episode_and_closes_its_environment() -> None:
    made = counting()
    fake = policy()
    fake.refuse["/generate"] = (500, "out of memory")
    [sample] = play(fake, make_settings(made, TOKENIZER), TOKENIZER)
    assert "answered 500: out of memory" in sample.metadata["failure"] and sample.status is Status.FAILED
    assert sample.numbers == {"environment_failures": 0.0}
    assert made.made[0].closed == 1


class Slow(Counting):
    """Its second step waits until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.goes = asyncio.Event(), asyncio.Event()

    async def step(self, response: Response) -> Any:
        if response.turn == 1:
            self.waits.set()
            await self.goes.wait()
        return await super().step(response)


def with_slow(call: Callable[[asyncio.Task[Sample], Slow, Gate, FakePolicy], Any]) -> None:
    async def go() -> None:
        fake, made = policy(), list[Slow]()

        def make() -> Slow:
            made.append(Slow())
            return made[-1]

        async with fake, ServerClient(fake.endpoint) as client:
            gate = Gate(1, 1)
            asker = Asker(client, gate, TOKENIZER.decode, deadline_s=20.0)
            attempt = Attempt(make_row(), Sampling(1000), 1, "train", 1, 0)
            playing = asyncio.create_task(Episodes(make_settings(make, TOKENIZER)).play(attempt, asker))
            while not made:
                await asyncio.sleep(0)
            await made[0].waits.wait()
            await call(playing, made[0], gate, fake)

    asyncio.run(asyncio.wait_for(go(), 30))


def test_while_the_environment_works_no_request_is_at_the_servers_and_a_pause_need_not_wait_for_it() -> None:
    async def call(playing: asyncio.Task[Sample], environment: Slow, gate: Gate, fake: FakePolicy) -> None:
        assert gate.running == 0
        gate.close()
        await gate.idle()
        environment.goes.set()
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert len(fake.turns) == 2 and not playing.done()
        gate.open()
        assert (await playing).status is Status.COMPLETED
        assert len(fake.turns) == 3

    with_slow(call)


def test_an_episode_that_is_cancelled_closes_its_environment() -> None:
    async def call(playing: asyncio.Task[Sample], environment: Slow, gate: Gate, _: FakePolicy) -> None:
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert environment.closed == 1 and gate.running == 0
        assert len(asyncio.all_tasks()) < 10

    with_slow(call)


def test_messages_of_the_row_are_where_the_environment_finds_them() -> None:
    """A row that was one string has one message of the user."""
    made = counting(1)
    play(policy(), make_settings(made, TOKENIZER), TOKENIZER, prompt=make_row("x"))
    found: list[Message] = list(made.made[0].rows[0].messages)
    assert found == [{"role": "user", "content": "x"}]


def test_what_an_environment_does_to_its_row_no_other_episode_sees() -> None:
    class Moving(Counting):
        async def start(self, row: EpisodeRow) -> Any:
            row.fields["board"][0].append("x")
            row.messages[0]["tool_calls"].append("y")
            return [{"role": "user", "content": "".join(row.fields["board"][0])}]

    prompt = make_row("x", board=[["a"]])
    prompt.metadata[MESSAGES_KEY][0]["tool_calls"] = []
    samples = play(policy(), make_settings(Moving, TOKENIZER, max_turns=1), TOKENIZER, prompt=prompt, indices=(0, 1))
    assert [sample.metadata["messages"][0]["content"] for sample in samples] == ["ax", "ax"]
    assert prompt.metadata == {"board": [["a"]], MESSAGES_KEY: [{"role": "user", "content": "x", "tool_calls": []}]}
