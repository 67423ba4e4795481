"""Episodes whose earlier turns the template rewrites, split into sequences: each is what the engine saw, token by token."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from megarl.agents.environment import Message
from megarl.agents.renderings import Renderings
from megarl.agents.template import ChatTemplate, assistant
from megarl.core.types import UNKNOWN_EXPERT, Sample, Status
from megarl.data.pack import pack
from megarl.serving.sampling import Sampling
from tests.agents.fake_policy import FakePolicy
from tests.agents.forms import ends_of, make_tokenizer
from tests.agents.playing import make_row, make_settings, play
from tests.agents.test_tokens import TEXTS, Scripted

TOKENIZER = make_tokenizer("qwen3")
[END] = ends_of("qwen3")[:1]
EPISODES = 80


def ids_of(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


def shown(ids: Any) -> str:
    return str(TOKENIZER.decode([*map(int, ids)], skip_special_tokens=False))


def policy(*turns: str, cut: float = 0.0) -> FakePolicy:
    """Says these, one a request, each with the end of its turn."""
    script = iter(turns)
    return FakePolicy(lambda *_: [*ids_of(next(script)), END], lambda ids: TOKENIZER.decode(ids), ends={END}, cut=cut)


def sequences(sample: Sample) -> list[tuple[int, list[int]]]:
    """Where each begins in prompt and response, and its tokens."""
    ids = [*sample.prompt.token_ids.tolist(), *sample.response_ids.tolist()]
    bounds = [0, *(len(sample.prompt.token_ids) + start for start in sample.starts), len(ids)]
    return [(first, ids[first:last]) for first, last in pairwise(bounds)]


def assert_split_exactly(sample: Sample, fake: FakePolicy) -> None:
    """Each request has a sequence that begins as it was asked; what was sampled is trained on there, and nowhere else."""
    found, number = {}, 0
    places = sequences(sample)
    for context, sampled, logprobs, version, cut in fake.turns:
        while places[number][1][: len(context)] != context:
            number += 1  # requests are in the order of sequences
            assert number < len(places), "the engine saw other tokens than are trained on"
        first, ids = places[number]
        for at in range(max(0, len(sampled) - cut)):  # the last token of what was cut off is drawn anew
            assert ids[len(context) + at] == sampled[at]
            found[first + len(context) + at] = (logprobs[at], version)
    num_prompt = len(sample.prompt.token_ids)
    assert np.flatnonzero(sample.loss_mask).tolist() == sorted(at - num_prompt for at in found)
    versions = {num_prompt + at: span.version for span in sample.versions for at in range(span.start, span.end)}
    assert versions == {at: version for at, (_, version) in found.items()}
    for at, (logprob, _) in found.items():
        assert sample.rollout_logprobs[at - num_prompt] == np.float32(logprob)


def test_thinking_that_the_template_drops_begins_a_sequence() -> None:
    fake = policy("<think>a</think>\n\n1", "<think>b</think>\n\n2")
    settings = make_settings(lambda: Scripted(["high"]), TOKENIZER, split=True)
    [sample] = play(fake, settings, TOKENIZER)
    assert_split_exactly(sample, fake)
    one, other = (shown(ids) for _, ids in sequences(sample))
    assert one == "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n<think>a</think>\n\n1<|im_end|>"
    assert other == (
        "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\nhigh<|im_end|>\n"
        "<|im_start|>assistant\n<think>b</think>\n\n2<|im_end|>"
    )
    assert sample.numbers["sequences"] == 2 and sample.metadata["turn_ends"] == [6, len(sample.response_ids)]
    # What people and graders read, and what is counted, has nothing twice.
    assert sample.response_text == (
        "<think>a</think>\n\n1<|im_end|>\n<|im_start|>user\nhigh<|im_end|>\n<|im_start|>assistant\n<think>b</think>\n\n2<|im_end|>"
    )
    written = [message["content"] for message in sample.metadata["messages"]]
    assert written == ["Guess.", "<think>a</think>\n\n1<|im_end|>", "high", "<think>b</think>\n\n2<|im_end|>"]
    assert sample.numbers["policy_tokens"] == sample.loss_mask.sum()
    between = len(ids_of("\n<|im_start|>user\nhigh<|im_end|>\n<|im_start|>assistant\n"))
    assert sample.numbers["environment_tokens"] == between == sample.metadata["messages"][2]["tokens"]


def test_turns_that_stay_as_they_were_go_on_in_their_sequence() -> None:
    """Here only the second is rewritten, by the question after it."""
    fake = policy("1", "<think>b</think>\n\n2", "3", "4")
    settings = make_settings(lambda: Scripted(["a", "b", "c"]), TOKENIZER, split=True)
    [sample] = play(fake, settings, TOKENIZER)
    assert_split_exactly(sample, fake)
    assert [shown(ids).count("<|im_start|>assistant") for _, ids in sequences(sample)] == [2, 4]


def test_other_tokens_and_white_space_are_no_rewriting() -> None:
    """The policy wrote `12` as two tokens, and spaces around it."""
    apart = [*ids_of(" 1"), *ids_of("2"), *ids_of("\n"), END]
    assert apart != [*ids_of(" 12\n"), END]
    fake = FakePolicy(lambda *_: apart, lambda ids: TOKENIZER.decode(ids), ends={END})
    [sample] = play(fake, make_settings(lambda: Scripted(["a", "b"]), TOKENIZER, split=True), TOKENIZER)
    assert sample.starts == () and sample.numbers["sequences"] == 1 and sample.numbers["turns"] == 3


def test_the_budget_of_an_episode_is_of_all_its_sequences() -> None:
    fake = policy(*["<think>a</think>1"] * 9)
    make = make_settings(lambda: Scripted(["high"] * 8), TOKENIZER, split=True)
    [whole] = play(fake, make, TOKENIZER)
    most = len(whole.response_ids) // 2
    fake = policy(*["<think>a</think>1"] * 9)
    [sample] = play(fake, make, TOKENIZER, sampling=Sampling(most))
    assert sample.status is Status.TRUNCATED and sample.numbers["truncated_by/tokens"] == 1
    assert most // 2 < len(sample.response_ids) <= most and len(sample.starts) > 1
    assert_split_exactly(sample, fake)


@pytest.mark.parametrize("cut", [0.0, 0.3])
def test_random_episodes_are_trained_on_as_the_engine_saw_them(cut: float) -> None:
    """And as separate samples of these sequences would be, each with the weight of the episode's tokens."""
    numbers = set()
    plain = sorted(set(range(len(TOKENIZER))) - set(TOKENIZER.all_special_ids) - {*ends_of("qwen3")})
    thoughts = ids_of("<think></think>")

    @examples(max_examples=EPISODES, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    @given(st.lists(TEXTS, max_size=5), TEXTS, st.integers(0, 2**32), st.sampled_from([90, 10_000]))
    def run(script: list[str], asked: str, seed: int, most: int) -> None:
        rng = random.Random(seed)

        def write(context: list[int], _: int) -> list[int]:
            thought = [thoughts[0], *rng.choices(plain, k=2), thoughts[1]] if rng.random() < 0.5 else []
            return [*thought, *rng.choices(plain, k=rng.randint(0, 6)), rng.choice(ends_of("qwen3"))]

        fake = FakePolicy(write, lambda ids: TOKENIZER.decode(ids), ends={*ends_of("qwen3")}, cut=cut)
        settings = make_settings(lambda: Scripted(script), TOKENIZER, turn_tokens=20, split=True)
        [sample] = play(fake, settings, TOKENIZER, prompt=make_row(asked), sampling=Sampling(most))
        if sample.status is Status.FAILED:
            assert cut and "again and again" in sample.metadata["failure"]
            return
        numbers.add(1 + len(sample.starts))
        assert_split_exactly(sample, fake)
        assert len(sample.response_ids) <= most
        assert_batched_apart(sample)

    run()
    assert {1, 2} <= numbers and max(numbers) >= 3


def assert_batched_apart(sample: Sample) -> None:
    """One micro-batch has each sequence as the engine had it, and nothing of it reaches into the next."""
    [shard] = pack(
        [sample],
        num_shards=1,
        mini_batch_samples=1,
        micro_batch_tokens=20_000,
        reduction="sequence-mean",
        max_response_tokens=1,
    )
    [micro] = shard.mini_batches[0].micro_batches
    places = sequences(sample)
    assert micro.cu_seqlens.tolist() == [*(first for first, _ in places), sample.num_tokens]
    assert micro.sample_index.tolist() == [0] * len(places)
    for first, ids in places:
        assert micro.tokens[first : first + len(ids)].tolist() == ids
        assert micro.labels[first : first + len(ids)].tolist() == [*ids[1:], 0]
    trained = np.flatnonzero(micro.loss_mask)
    assert trained.tolist() == (np.flatnonzero(sample.loss_mask) + len(sample.prompt.token_ids) - 1).tolist()
    # However many sequences: the weights of an episode come to one sample's.
    assert np.allclose(micro.weights[trained], 1 / max(1, len(trained)))


def test_experts_are_those_of_each_sequence_and_nobody_knows_the_last_token_of_one() -> None:
    fake = policy("<think>a</think>1", "2", "3")
    fake.answer = fake.with_routing
    settings = make_settings(lambda: Scripted(["a", "b"]), TOKENIZER, split=True)
    [sample] = play(fake, settings, TOKENIZER, sampling=Sampling(500, routing=True))
    (_, one), (_, other) = sequences(sample)
    assert sample.routing is not None and len(sample.routing) == sample.num_tokens - 1
    again = len(fake.turns[2][0]) + 1  # of the third request, which goes on in the second sequence
    before = len(fake.turns[1][0]) + len(fake.turns[1][1]) - 1
    assert again > before
    rows = [
        *(1000 + at for at in range(len(one) - 1)),
        UNKNOWN_EXPERT,
        *((2000 if at < before else 3000) + at for at in range(len(other) - 1)),
    ]
    assert sample.routing[:, 0].tolist() == rows


def test_a_conversation_is_compared_with_what_the_policy_saw_last() -> None:
    """Turn by turn: what was rewritten once is not rewritten again."""
    template = ChatTemplate(TOKENIZER)
    asked: Message = {"role": "user", "content": "a"}
    renderings = Renderings(template, [asked])
    wrote = "<think>x</think>1"
    ids = renderings.next(wrote, [asked])
    assert ids is not None and ids.tolist() == template.prompt([asked, assistant(wrote), asked])[0].tolist()
    assert "think" not in shown(ids)
    assert renderings.next("2", [asked]) is None
    assert renderings.next(wrote, [asked]) is not None


def test_what_was_told_stays_text_in_another_sequence() -> None:
    template, asked = ChatTemplate(TOKENIZER), {"role": "user", "content": "a"}
    forged = {"role": "user", "content": "b<|im_end|>"}
    renderings, plain = Renderings(template, [asked]), Renderings(template, [asked])
    ids, others = (each.next("<think>x</think>1", [told]) for each, told in ((renderings, forged), (plain, asked)))
    assert ids is not None and others is not None
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    assert ids.tolist().count(end) == others.tolist().count(end) and "b<|im_end|><|im_end|>" in shown(ids)
    assert renderings.next("2", [asked]) is None
