"""Requests that extend an episode's conversation become its sample, to the bit; what does not extend it is refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from megarl.agents.endpoint import session
from megarl.agents.endpoint.model import Model
from megarl.agents.endpoint.text_matching import KnownText
from megarl.agents.environment import Done, EpisodeRow
from megarl.agents.environments.guess_number import GuessNumber
from megarl.agents.template import QUICK
from megarl.core.types import Sample, Status
from megarl.data.spelled import Spelled
from megarl.rollout.seeds import request_seed
from megarl.serving.call_parser import Parsed, ParsedCall
from megarl.serving.sampling import Sampling
from tests.agents.endpoint.harnesses import END, MODEL, TOKENIZER, guess, harnessed, ids_of, writing
from tests.agents.playing import make_settings, play
from tests.agents.test_tokens import assert_exact
from tests.agents.test_tools import FakeReader
from tests.support.llama2 import llama2_tokenizer

TURNS = ("50", "25", "what?", " 40 ", "45", "42")


def same(one: Sample, other: Sample) -> None:
    """To the bit, but for what is measured in seconds."""
    assert one.memory is not None and other.memory is not None
    assert one.memory.tobytes() == other.memory.tobytes()
    assert one.prompt.token_ids.tolist() == other.prompt.token_ids.tolist()
    assert (one.response_text, one.versions, one.status) == (other.response_text, other.versions, other.status)
    assert (one.id, one.reward, one.reward_parts, one.metadata) == (
        other.id,
        other.reward,
        other.reward_parts,
        other.metadata,
    )
    assert without_seconds(one) == without_seconds(other)


def without_seconds(sample: Sample) -> dict[str, float]:
    return {name: value for name, value in sample.numbers.items() if not name.endswith("_s")}


def test_the_same_game_leaves_the_same_sample_as_in_process() -> None:
    inside, outside = writing(*TURNS), writing(*TURNS)
    [own] = play(inside, make_settings(GuessNumber, TOKENIZER), TOKENIZER)
    [theirs] = harnessed(outside, guess)
    same(own, theirs)
    assert theirs.reward == 1.0 and theirs.metadata["turn_rewards"] == [0.0] * 5 + [1.0]
    # Also what the engine was asked with: ids, seeds, lengths.
    assert inside.bodies("/generate") == outside.bodies("/generate")
    assert_exact(theirs, outside)


def test_pieces_that_a_server_cuts_off_change_nothing() -> None:
    inside, outside = writing("50", "42", cut=0.5), writing("50", "42", cut=0.5)
    [own] = play(inside, make_settings(GuessNumber, TOKENIZER), TOKENIZER)
    [theirs] = harnessed(outside, guess)
    assert any(cut for *_, cut in outside.turns)
    same(own, theirs)


def test_many_episodes_at_once_keep_to_themselves() -> None:
    samples = harnessed(writing("42"), guess, indices=range(30))
    assert [sample.reward for sample in samples] == [1.0] * 30
    assert len({sample.id for sample in samples}) == 30


@pytest.mark.parametrize(
    ("limits", "most", "over", "turns", "says"),
    [
        ({"max_turns": 2}, 1000, "turns", 2, "agent.max_turns"),
        ({"turn_tokens": 1}, 1000, "tokens", 1, "agent.turn_tokens"),
        ({}, 12, "tokens", 1, "rollout.max_response_tokens"),
    ],
)
def test_a_budget_that_runs_out_truncates_the_episode(
    limits: dict[str, Any], most: int, over: str, turns: int, says: str
) -> None:
    told: list[str] = []

    async def go_on(client: AsyncOpenAI, row: EpisodeRow) -> None:
        messages: list[Any] = [*row.messages]
        while True:
            try:
                answer = await client.chat.completions.create(model=MODEL, messages=messages)
            except openai.BadRequestError as error:
                told.append(str(error))
                raise
            messages += [answer.choices[0].message, {"role": "user", "content": "a"}]

    [sample] = harnessed(writing("55"), go_on, sampling=Sampling(most), **limits)
    assert sample.status is Status.TRUNCATED and sample.numbers[f"truncated_by/{over}"] == 1.0
    assert sample.numbers["turns"] == turns and sample.loss_mask[-1] == 1
    assert says in told[0] and len(told) == 1


def test_what_is_far_too_long_is_refused_without_being_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Spelled.encode

    def short_ones(self: Spelled, text: str) -> Any:
        assert len(text) < QUICK
        return encode(self, text)

    monkeypatch.setattr(Spelled, "encode", short_ones)
    long: Any = {"role": "user", "content": "a" * (QUICK + 1)}

    async def babbles(client: AsyncOpenAI, row: EpisodeRow) -> float:
        with pytest.raises(openai.BadRequestError, match=r"far more tokens, and .* is 1000") as caught:
            await client.chat.completions.create(model=MODEL, messages=[long])
        assert caught.value.code == "context_length_exceeded"
        first = await client.chat.completions.create(model=MODEL, messages=list(row.messages))  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError, match=r"rollout\.max_response_tokens .* is used up"):
            await client.chat.completions.create(model=MODEL, messages=[*row.messages, first.choices[0].message, long])
        return 1.0

    [sample] = harnessed(writing("55"), babbles, sampling=Sampling(1000))
    assert sample.status is Status.TRUNCATED and sample.numbers["truncated_by/tokens"] == 1.0


def test_seconds_that_run_out_truncate_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn the harness takes 4 s of a clock that nothing else moves: what it asks after 8.1 s is refused."""
    clock = 0.0
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: clock))

    async def slow(client: AsyncOpenAI, row: EpisodeRow) -> None:
        nonlocal clock
        messages: list[Any] = [*row.messages]
        while True:
            answer = await client.chat.completions.create(model=MODEL, messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "a"}]
            clock += 4.0

    [sample] = harnessed(writing("55"), slow, timeout_s=8.1)
    assert sample.status is Status.TRUNCATED and sample.numbers["truncated_by/time"] == 1.0
    assert sample.numbers["turns"] == 3 and sample.loss_mask[-1] == 1
    [sample] = harnessed(writing("55"), slow, timeout_s=-1.0)  # before its first turn: there is nothing to train on
    assert sample.status is Status.FAILED and "agent.timeout_s had passed before" in sample.metadata["failure"]


def test_an_agents_own_max_tokens_ends_a_turn_and_not_the_episode() -> None:
    async def short(client: AsyncOpenAI, row: EpisodeRow) -> float:
        first = await client.chat.completions.create(model=MODEL, messages=list(row.messages), max_completion_tokens=1)  # type: ignore[arg-type]
        assert first.choices[0].finish_reason == "length" and first.usage is not None
        assert first.usage.completion_tokens == 1
        messages: list[Any] = [*row.messages, first.choices[0].message, {"role": "user", "content": "a"}]
        await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=50)
        return 1.0

    fake = writing("high5")
    [sample] = harnessed(fake, short)
    assert sample.status is Status.COMPLETED and sample.numbers["turns"] == 2
    assert_exact(sample, fake)
    assert sample.response_ids[1] == END and sample.loss_mask[1] == 0, "the template ends the turn that was cut off"


async def two_turns(client: AsyncOpenAI, row: EpisodeRow, **second: Any) -> Any:
    first = await client.chat.completions.create(model=MODEL, messages=list(row.messages))  # type: ignore[arg-type]
    said = first.choices[0].message
    messages: list[Any] = [*row.messages, said, {"role": "user", "content": "on"}]
    return await client.chat.completions.create(**{"model": MODEL, "messages": messages, **second})


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "user", "content": "Guess!"}], "message 1 was the user's 'Guess.', and now is the user's 'Guess!'"),
        ([{"role": "user", "content": "Guess."}], "it was answered already"),
        (
            [
                {"role": "user", "content": "Guess."},
                {"role": "assistant", "content": "51"},
                {"role": "user", "content": "x"},
            ],
            "message 2 was the assistant's '50', and now is the assistant's '51'",
        ),
        (
            [{"role": "user", "content": "Guess."}, {"role": "assistant", "content": "50"}],
            "nothing was added to what the model said last",
        ),
        (
            [
                {"role": "user", "content": "Guess."},
                {"role": "assistant", "content": "50"},
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "y"},
                {"role": "user", "content": "z"},
            ],
            "a message of the assistant's was added that the model did not write",
        ),
    ],
)
def test_a_conversation_that_is_another_is_refused_and_the_episode_goes_on(messages: Any, says: str) -> None:
    async def branches(client: AsyncOpenAI, row: EpisodeRow) -> float:
        first = await client.chat.completions.create(model=MODEL, messages=list(row.messages))  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=messages)
        assert says in str(caught.value) and caught.value.code == "conversation_not_extended"
        on: list[Any] = [*row.messages, first.choices[0].message, {"role": "user", "content": "on"}]
        await client.chat.completions.create(model=MODEL, messages=on)
        return 1.0

    fake = writing("50", "42")
    [sample] = harnessed(fake, branches)
    assert sample.metadata.get("failure") is None and sample.numbers["turns"] == 2
    assert_exact(sample, fake)


def test_what_clients_do_to_a_message_does_not_make_it_another() -> None:
    """White space taken off, text as parts, and all the fields that the client's own form has."""

    async def careless(client: AsyncOpenAI, row: EpisodeRow) -> float:
        first = await client.chat.completions.create(model=MODEL, messages=list(row.messages))  # type: ignore[arg-type]
        said = first.choices[0].message
        assert said.content == " 50\n"
        parts = [{"type": "text", "text": row.messages[0]["content"]}]
        messages: list[Any] = [
            {"role": "user", "content": parts},
            {**said.model_dump(), "content": "50"},
            {"role": "user", "content": "on"},
        ]
        await client.chat.completions.create(model=MODEL, messages=messages)
        return 1.0

    fake = writing(" 50\n", "42")
    [sample] = harnessed(fake, careless)
    assert sample.metadata.get("failure") is None
    assert_exact(sample, fake)


def test_a_client_that_asks_again_gets_the_same_answer() -> None:
    async def again(client: AsyncOpenAI, row: EpisodeRow) -> float:
        asked: Any = {"model": MODEL, "messages": list(row.messages)}
        retried = {"x-stainless-retry-count": "1"}
        one = await client.chat.completions.create(**asked)
        two = await client.chat.completions.create(**asked, extra_headers=retried)
        assert one.choices[0].message == two.choices[0].message
        return 1.0

    fake = writing("50", "42")
    [sample] = harnessed(fake, again)
    assert len(fake.turns) == 1 and sample.numbers["turns"] == 1


def test_a_client_that_hangs_up_in_a_later_turn_asks_again() -> None:
    """Whoever asks then: the openai package by itself, or an agent with a patience of its own."""
    fake = writing("50", "51", "42", "43")

    async def hangs_up(client: AsyncOpenAI, row: EpisodeRow) -> float:
        messages: list[Any] = list(row.messages)
        first = await client.chat.completions.create(model=MODEL, messages=messages, n=2)
        messages += [first.choices[1].message, {"role": "user", "content": "on"}]
        fake.gate = asyncio.Event()
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.2, max_retries=1).chat.completions.create(
                model=MODEL, messages=messages
            )
        fake.gate.set()
        for wrong, says in (
            (messages[:1], "it ends after message 1"),
            (messages[:2], "nothing was added"),
            ([messages[0], first.choices[0].message, messages[2]], "message 2 was the assistant's '51'"),
        ):
            with pytest.raises(openai.BadRequestError, match=says):
                await client.chat.completions.create(model=MODEL, messages=wrong)
        said = (await client.chat.completions.create(model=MODEL, messages=messages)).choices[0].message
        await client.chat.completions.create(model=MODEL, messages=[*messages, said, {"role": "user", "content": "on"}])
        return 1.0

    [sample] = harnessed(fake, hangs_up)
    assert sample.metadata.get("failure") is None and sample.numbers["turns"] == 3
    assert [message["role"] for message in sample.metadata["messages"]] == ["user", "assistant"] * 3


@pytest.mark.parametrize("calls", [[{"function": "multiply"}], [{"function": [1]}], [{}]])
def test_calls_without_a_function_are_those_of_another_conversation(calls: Any) -> None:
    async def odd(client: AsyncOpenAI, row: EpisodeRow) -> float:
        first = await client.chat.completions.create(model=MODEL, messages=list(row.messages))  # type: ignore[arg-type]
        said = {**first.choices[0].message.model_dump(), "tool_calls": calls}
        messages: list[Any] = [*row.messages, said, {"role": "user", "content": "on"}]
        with pytest.raises(openai.BadRequestError, match="does not extend the episode's conversation"):
            await client.chat.completions.create(model=MODEL, messages=messages)
        return 1.0

    [sample] = harnessed(writing("50"), odd)
    assert sample.metadata.get("failure") is None


def test_of_several_choices_the_one_that_the_conversation_goes_on_with_is_trained_on() -> None:
    async def choose(client: AsyncOpenAI, row: EpisodeRow) -> float:
        first = await client.chat.completions.create(model=MODEL, messages=list(row.messages), n=3)  # type: ignore[arg-type]
        assert [choice.message.content for choice in first.choices] == ["50", "51", "52"]
        messages: list[Any] = [*row.messages, first.choices[1].message, {"role": "user", "content": "on"}]
        last = await client.chat.completions.create(model=MODEL, messages=messages, n=2)
        assert len(last.choices) == 2
        return 1.0

    fake = writing("50", "51", "52", "42", "43")
    [sample] = harnessed(fake, choose)
    assert [message["content"] for message in sample.metadata["messages"]] == ["Guess.", "51", "on", "42"]
    assert sample.numbers["turns"] == 2 and sample.loss_mask.sum() == sum(len(ids_of(text)) for text in ("51", "42"))
    seeds = [body["sampling_params"]["sampling_seed"] for body in fake.bodies("/generate")]
    wanted = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert seeds == [request_seed(1, "train", 3, "rows.jsonl:1", 0, *each) for each in wanted]


@pytest.mark.parametrize("goes_on", [False, True])
def test_of_several_choices_one_that_a_budget_cut_off_ends_the_episode(goes_on: bool) -> None:
    async def choose(client: AsyncOpenAI, row: EpisodeRow) -> float:
        first = await client.chat.completions.create(model=MODEL, messages=list(row.messages), n=2)  # type: ignore[arg-type]
        assert [choice.finish_reason for choice in first.choices] == ["length", "stop"]
        if goes_on:
            messages: Any = [*row.messages, first.choices[0].message, {"role": "user", "content": "a"}]
            with pytest.raises(openai.BadRequestError, match=r"agent\.turn_tokens .* is used up"):
                await client.chat.completions.create(model=MODEL, messages=messages)
        return 1.0

    fake = writing("5" * 30, "5")
    [sample] = harnessed(fake, choose, turn_tokens=10)
    assert sample.status is Status.TRUNCATED and sample.numbers["truncated_by/tokens"] == 1.0
    assert sample.numbers["turns"] == 1 and sample.loss_mask.tolist() == [1] * 10 and sample.reward == 1.0


def test_a_run_samples_by_its_own_rules_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async def cold(client: AsyncOpenAI, row: EpisodeRow) -> float:
        await two_turns(client, row, temperature=0.2, top_p=0.5, seed=3, stop=["]"])
        return 1.0

    fake = writing("50")
    harnessed(fake, cold, sampling=Sampling(100, 0.9, stop=("#",)), indices=range(2))
    for body in fake.bodies("/generate"):
        params = body["sampling_params"]
        assert (params["temperature"], params["top_p"]) == (0.9, 1.0) and params["sampling_seed"] != 3
    assert {tuple(body["sampling_params"]["stop"]) for body in fake.bodies("/generate")} == {("#",), ("#", "]")}
    assert caplog.text.count("the agent asks for temperature=0.2, top_p=0.5, seed=3") == 1


TOOL: Any = {
    "type": "function",
    "function": {"name": "multiply", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def test_tools_of_the_agent_stand_in_the_prompt_and_their_calls_are_read() -> None:
    async def with_tools(client: AsyncOpenAI, row: EpisodeRow) -> float:
        messages: list[Any] = [*row.messages]
        first = await client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
        [choice] = first.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        [one, two] = choice.message.tool_calls or []
        assert one.type == "function" and one.function.name == "multiply" and one.function.arguments == '{"left": 1}'
        told = [{"role": "tool", "tool_call_id": call.id, "content": "ab"} for call in (one, two)]
        messages += [choice.message, *told]
        last = await client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
        assert last.choices[0].message.content == "b" and last.choices[0].finish_reason == "stop"
        with pytest.raises(openai.BadRequestError, match="The tools are others than in the episode's first request"):
            await client.chat.completions.create(
                model=MODEL, messages=[*messages, last.choices[0].message, {"role": "user", "content": "x"}]
            )
        return 1.0

    fake = writing("12", "b")
    [sample] = harnessed(fake, with_tools, parser=FakeReader())
    assert sample.metadata.get("failure") is None
    assert "multiply" in TOKENIZER.decode(sample.prompt.token_ids)
    assert sample.numbers["tool_calls"] == 2.0
    text = TOKENIZER.decode(sample.response_ids)
    assert text.count("<tool_response>\nab\n</tool_response>") == 2
    assert_exact(sample, fake)


def test_a_call_within_thinking_is_a_part_of_the_text() -> None:
    async def with_tools(client: AsyncOpenAI, row: EpisodeRow) -> float:
        messages: list[Any] = [*row.messages]
        first = await client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
        [choice] = first.choices
        [call] = choice.message.tool_calls or []
        assert call.type == "function" and call.function.arguments == '{"left": 1}'
        assert choice.message.content == "<think>high 2</think>"
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "ab"}]
        last = await client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
        assert last.choices[0].finish_reason == "stop" and last.choices[0].message.tool_calls is None
        return 1.0

    fake = writing("<think>high 2</think>1", "<think>2</think>b")
    [sample] = harnessed(fake, with_tools, parser=FakeReader())
    assert sample.reward == 1.0 and sample.metadata.get("failure") is None
    assert_exact(sample, fake)


def test_a_call_nested_deeper_than_json_is_written_costs_nothing() -> None:
    arguments = f'{{"left": {"[" * 300}{"]" * 300}}}'

    class Deep(FakeReader):
        async def parse(self, text: str, tools: Any = None) -> Parsed:
            return Parsed((ParsedCall("multiply", arguments),) if text == "12" else (), unread=False, text="")

    async def with_tools(client: AsyncOpenAI, row: EpisodeRow) -> float:
        messages: list[Any] = [*row.messages]
        said = await client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
        [call] = said.choices[0].message.tool_calls or []
        assert call.type == "function" and call.function.arguments == arguments
        messages += [said.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "ab"}]
        await client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
        return 1.0

    fake = writing("12", "b")
    [sample] = harnessed(fake, with_tools, parser=Deep())
    assert sample.reward == 1.0 and sample.metadata.get("failure") is None
    assert_exact(sample, fake)


def test_without_a_parser_tools_are_refused() -> None:
    async def with_tools(client: AsyncOpenAI, row: EpisodeRow) -> None:
        await client.chat.completions.create(model=MODEL, messages=list(row.messages), tools=[TOOL])  # type: ignore[arg-type]

    [sample] = harnessed(writing("1"), with_tools)
    assert "Set agent.tool_parser" in sample.metadata["failure"]


def test_tools_nested_deeper_than_json_is_written_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"properties": schema}
    deep = {"type": "function", "function": {"name": "deep", "parameters": schema}}

    async def with_tools(client: AsyncOpenAI, row: EpisodeRow) -> float:
        messages: list[Any] = [*row.messages]
        with pytest.raises(openai.BadRequestError, match="tools: they cannot be written as JSON"):
            await client.chat.completions.create(model=MODEL, messages=messages, tools=[deep])  # type: ignore[list-item]
        await client.chat.completions.create(model=MODEL, messages=messages)
        return 1.0

    [sample] = harnessed(writing("1"), with_tools, parser=FakeReader())
    assert sample.reward == 1.0 and sample.metadata.get("failure") is None


def test_completions_go_on_with_a_text() -> None:
    stop = TOKENIZER("]", add_special_tokens=False)["input_ids"]

    async def text(client: AsyncOpenAI, row: EpisodeRow) -> float:
        first = await client.completions.create(model=MODEL, prompt="high", stop="]", logprobs=1)
        [choice] = first.choices
        assert choice.text == "12" and choice.logprobs is not None
        assert choice.logprobs.tokens == ["12", "]"]
        await client.completions.create(model=MODEL, prompt="high12] low")
        with pytest.raises(openai.BadRequestError, match="does not extend the episode's text"):
            await client.completions.create(model=MODEL, prompt="low")
        with pytest.raises(openai.BadRequestError, match="began with completions"):
            await client.chat.completions.create(model=MODEL, messages=list(row.messages))  # type: ignore[arg-type]
        return 1.0

    fake = writing([*ids_of("12")[:-1], *stop], "42")
    plain = fake.answer

    def stopped(body: dict[str, Any]) -> dict[str, Any]:
        answer = dict(plain(body))
        if answer["output_ids"][-1] == stop[0]:
            answer["text"] = "12"
            answer["meta_info"]["finish_reason"] = {"type": "stop", "matched": "]"}
        return answer

    fake.answer = stopped
    [sample] = harnessed(fake, text)
    assert sample.metadata.get("failure") is None
    assert TOKENIZER.decode([*sample.prompt.token_ids, *sample.response_ids]) == "high12] low42<|im_end|>"
    assert_exact(sample, fake)


def test_a_text_that_goes_on_gets_no_blank_of_the_tokenizer_s() -> None:
    tokenizer = llama2_tokenizer()
    model, known = Model(MODEL, tokenizer, None), KnownText()
    begun = known.extended("1", [], model).ids.tolist()
    assert tokenizer.convert_ids_to_tokens(begun)[-2:] == ["▁", "1"]  # where a text begins, the tokenizer puts one
    known.told("1")
    for told, pieces in (("2", ["2"]), (" 2", ["▁", "2"]), ("", [])):
        found = known.extended("1" + told, [], model)
        assert (tokenizer.convert_ids_to_tokens(found.ids.tolist()), found.shown) == (pieces, told)


def test_completions_go_on_with_token_ids() -> None:
    async def ids(client: AsyncOpenAI, row: EpisodeRow) -> float:
        await client.completions.create(model=MODEL, prompt=[5, 6])
        written = ids_of("12")
        await client.completions.create(model=MODEL, prompt=[5, 6, *written, 7])
        for wrong in ([5, 6, 7], [10**6], "high"):
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model=MODEL, prompt=wrong)  # type: ignore[arg-type]
        return 1.0

    fake = writing("12", "42")
    [sample] = harnessed(fake, ids)
    assert [*sample.prompt.token_ids, *sample.response_ids] == [5, 6, *ids_of("12"), 7, *ids_of("42")]
    assert_exact(sample, fake)


def test_rewards_of_turns_add_up() -> None:
    async def rewards(client: AsyncOpenAI, row: EpisodeRow) -> Done:
        async def report(reward: float, **metrics: float) -> None:
            body = {"reward": reward, "metrics": metrics}
            await client.post("/episode/reward", body=body, cast_to=object)

        with pytest.raises(openai.BadRequestError, match="nothing to reward yet"):
            await report(1.0)
        await client.chat.completions.create(model=MODEL, messages=list(row.messages))  # type: ignore[arg-type]
        await report(0.5)
        messages: list[Any] = [*row.messages, {"role": "assistant", "content": "5"}, {"role": "user", "content": "on"}]
        await client.chat.completions.create(model=MODEL, messages=messages)
        await report(0.25, seen=2.0)
        return Done(1.0, {"solved": 1.0})

    [sample] = harnessed(writing("5"), rewards)
    assert (sample.reward, sample.metadata["turn_rewards"]) == (1.75, [0.5, 1.25])
    assert (sample.numbers["by/seen"], sample.numbers["by/solved"]) == (2.0, 1.0)
    assert sample.reward_parts == {"environment": 1.75}


def test_a_reward_that_is_sent_again_counts_once() -> None:
    """As the openai package does where it had no answer in time; two turns may be worth the same."""

    async def rewards(client: AsyncOpenAI, row: EpisodeRow) -> None:
        async def report(retry: int) -> None:
            options: Any = {"headers": {"x-stainless-retry-count": str(retry)}}
            await client.post("/episode/reward", body={"reward": 0.5}, cast_to=object, options=options)

        await client.chat.completions.create(model=MODEL, messages=list(row.messages))  # type: ignore[arg-type]
        await report(0)
        await report(1)
        messages: list[Any] = [*row.messages, {"role": "assistant", "content": "5"}, {"role": "user", "content": "on"}]
        await client.chat.completions.create(model=MODEL, messages=messages)
        await report(1)  # the first did not come so far
        await report(2)

    [sample] = harnessed(writing("5"), rewards)
    assert sample.metadata["turn_rewards"] == [0.5, 0.5]


def test_a_server_that_never_answers_fails_the_episode() -> None:
    async def ask(client: AsyncOpenAI, row: EpisodeRow) -> None:
        with pytest.raises(openai.InternalServerError, match="the episode has failed"):
            await client.chat.completions.create(model=MODEL, messages=list(row.messages))  # type: ignore[arg-type]

    fake = writing("1")
    fake.refuse["/generate"] = (500, "out of memory")
    [sample] = harnessed(fake, ask)
    assert sample.status is Status.FAILED and "answered 500: out of memory" in sample.metadata["failure"]
    assert sample.numbers == {"environment_failures": 0.0}
    assert len(fake.bodies("/generate")) == 1, "the client does not ask again"


def test_log_probs_are_those_of_the_sample() -> None:
    found: list[float] = []

    async def look(client: AsyncOpenAI, row: EpisodeRow) -> float:
        answer = await client.chat.completions.create(model=MODEL, messages=list(row.messages), logprobs=True)  # type: ignore[arg-type]
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        found.extend(each.logprob for each in logprobs.content)
        assert "".join(each.token for each in logprobs.content) == "high5<|im_end|>"
        return 1.0

    [sample] = harnessed(writing("high5"), look)
    assert np.array(found, np.float32).tolist() == sample.rollout_logprobs.tolist()
