"""What is trained on is what the engine saw, token by token, whatever the template, the tokenizer, and whatever is cut off."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from megarl.agents.environment import Done, EpisodeRow, Message, Response, Turn
from megarl.core.types import Record, Sample, Status, VersionSpan
from megarl.data.blocks import laid
from megarl.serving.sampling import Sampling
from tests.agents.fake_policy import FakePolicy
from tests.agents.forms import FORMS, ends_of, make_tokenizer
from tests.agents.playing import make_row, make_settings, play

EPISODES_EACH = 100  # of each form, with its tokenizer with and without spaces put before texts: 1,000 together

TEXTS = st.text(alphabet="the high12\n lower.[é", max_size=12)


class Scripted:
    """Says what a script has, turn by turn, and is done then."""

    def __init__(self, script: Sequence[str]) -> None:
        self.script = list(script)
        self.closed = 0

    async def start(self, row: EpisodeRow) -> list[Message]:
        return list(row.messages)

    async def step(self, response: Response) -> Turn | Done:
        if response.turn >= len(self.script):
            return Done(1.0)
        return Turn([{"role": "user", "content": self.script[response.turn]}], 0.25)

    async def close(self) -> None:
        self.closed += 1


def make_policy(tokenizer: Any, ends: list[int], seed: int, cut: float) -> FakePolicy:
    """Writes up to 12 random tokens, and any end; sometimes it never ends."""
    rng = random.Random(seed)
    plain = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids) - {*ends})

    def write(context: list[int], most: int) -> list[int]:
        # What was cut off is asked again with what there is: the rest is anything.
        ended = rng.random() < 0.95
        return [*rng.choices(plain, k=rng.randint(0, 11)), rng.choice(ends)] if ended else rng.choices(plain, k=99)

    return FakePolicy(write, lambda ids: tokenizer.decode(ids, skip_special_tokens=True), ends={*ends}, cut=cut)


def assert_exact(sample: Sample, fake: FakePolicy) -> None:
    """The sample's tokens are those of the requests, in their order, and its mask covers what was sampled and stayed."""
    prompt = sample.prompt.token_ids.tolist()
    ids = [*prompt, *sample.response_ids.tolist()]
    written = {}  # position -> token, log-prob, version
    for context, sampled, logprobs, version, cut in fake.turns:
        assert ids[: len(context)] == context, "the engine saw other tokens than are trained on"
        kept = len(sampled) - 1 if cut else len(sampled)  # the last token of what was cut off is drawn anew
        for at in range(max(0, kept)):
            written[len(context) + at] = (sampled[at], logprobs[at], version)
    assert ids and len(sample.response_ids) == len(sample.loss_mask) == len(sample.rollout_logprobs)
    assert np.flatnonzero(sample.loss_mask).tolist() == sorted(at - len(prompt) for at in written)
    versions = np.full(len(ids), -1)
    for span in sample.versions:
        versions[len(prompt) + span.start : len(prompt) + span.end] = span.version
    for at, (token, logprob, version) in written.items():
        assert (ids[at], versions[at]) == (token, version)
        assert sample.rollout_logprobs[at - len(prompt)] == np.float32(logprob)
    assert (versions == -1).sum() == len(ids) - len(written)
    assert sample.rollout_logprobs[sample.loss_mask == 0].tolist() == [0.0] * int((sample.loss_mask == 0).sum())


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_random_episodes_are_trained_on_as_the_engine_saw_them(form: str, spaced: bool) -> None:
    tokenizer = make_tokenizer(form, spaced=spaced)
    statuses = set()

    @examples(max_examples=EPISODES_EACH, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    @given(
        st.lists(TEXTS, max_size=5),
        TEXTS,
        st.integers(0, 2**32),
        st.sampled_from([0.0, 0.3]),
        st.sampled_from([40, 10_000]),
    )
    def run(script: list[str], asked: str, seed: int, cut: float, most: int) -> None:
        fake = make_policy(tokenizer, ends_of(form), seed, cut)
        settings = make_settings(lambda: Scripted(script), tokenizer, turn_tokens=20)
        [sample] = play(fake, settings, tokenizer, prompt=make_row(asked), sampling=Sampling(most))
        if sample.status is Status.FAILED:  # cut off again and again
            assert cut and "again and again" in sample.metadata["failure"]
            return
        statuses.add(sample.status)
        assert_exact(sample, fake)
        assert len(sample.response_ids) <= most
        assert sample.numbers["policy_tokens"] == sample.loss_mask.sum()
        assert sample.numbers["policy_tokens"] + sample.numbers["environment_tokens"] == len(sample.response_ids)
        # And so it goes into a batch.
        assert sample.memory is not None
        record = Record.of(sample.memory)
        assert record.tokens.tolist() == [*sample.prompt.token_ids, *sample.response_ids]
        assert record.loss_mask.sum() == sample.loss_mask.sum()

    run()
    assert statuses == {Status.COMPLETED, Status.TRUNCATED}


def test_a_turn_that_ends_with_a_stop_string_gets_the_end_of_its_turn_from_the_template() -> None:
    tokenizer = make_tokenizer("qwen3")
    stop, end = tokenizer("]", add_special_tokens=False)["input_ids"][0], ends_of("qwen3")[0]
    fake = FakePolicy(lambda *_: [5, stop], lambda ids: tokenizer.decode(ids), ends={stop})
    [sample] = play(
        fake, make_settings(lambda: Scripted(["a"]), tokenizer), tokenizer, sampling=Sampling(500, stop=("]",))
    )
    assert_exact(sample, fake)
    assert sample.response_ids[1:3].tolist() == [stop, end]
    assert sample.loss_mask[:3].tolist() == [1, 1, 0]
    assert sample.status is Status.COMPLETED


def test_experts_of_all_turns_follow_each_other() -> None:
    tokenizer = make_tokenizer("qwen3")
    end = ends_of("qwen3")[0]
    fake = FakePolicy(lambda *_: [5, end], lambda ids: tokenizer.decode(ids), ends={end})
    fake.answer = fake.with_routing
    settings = make_settings(lambda: Scripted(["a", "b"]), tokenizer)
    [sample] = play(fake, settings, tokenizer, sampling=Sampling(500, routing=True))
    assert sample.routing is not None and len(sample.routing) == sample.num_tokens - 1
    firsts = [len(context) + 1 for context, *_ in fake.turns]
    expected = [at + 1000 * (1 + sum(at >= first for first in firsts[:-1])) for at in range(sample.num_tokens - 1)]
    assert sample.routing[:, 0].tolist() == [np.int16(number) for number in expected]


def test_tokens_by_hand() -> None:
    """Two turns of two tokens, with what the template puts between them."""
    tokenizer = make_tokenizer("deepseek")
    [end], five = ends_of("deepseek"), tokenizer("5", add_special_tokens=False)["input_ids"]
    fake = FakePolicy(lambda *_: [*five, end], lambda _: "5", ends={end})
    [sample] = play(fake, make_settings(lambda: Scripted(["high"]), tokenizer), tokenizer, prompt=make_row("low"))
    names = tokenizer.convert_ids_to_tokens([*sample.prompt.token_ids, *sample.response_ids])
    assert names == [
        "<bos>",
        "<|User|>",
        "low",
        "<|Assistant|>",
        "5",
        "<eos>",
        "<|User|>",
        "high",
        "<|Assistant|>",
        "5",
        "<eos>",
    ]
    assert sample.loss_mask.tolist() == [1, 1, 0, 0, 0, 1, 1]
    assert sample.versions == (VersionSpan(1, 0, 2), VersionSpan(2, 5, 7))
    assert sample.reward == 1.25 and sample.reward_parts == {"environment": 1.25}
    assert sample.metadata["turn_rewards"] == [0.25, 1.0]
    assert sample.metadata["messages"] == [
        {"role": "user", "content": "low", "tokens": 4},
        {"role": "assistant", "content": "5", "tokens": 2},
        {"role": "user", "content": "high", "tokens": 3},
        {"role": "assistant", "content": "5", "tokens": 2},
    ]
    assert laid(sample).loss_mask.tolist() == sample.loss_mask.tolist()
