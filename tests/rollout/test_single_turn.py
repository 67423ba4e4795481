"""From a server's answer, or its failure, to a Sample."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from megarl.core.metrics import check_names
from megarl.core.types import Prompt, Sample, Status, VersionSpan
from megarl.rollout.episode_metrics import episode_metrics
from megarl.rollout.facts import GroupFacts
from megarl.rollout.single_turn import PER_PASS
from megarl.serving.client import ServerClient
from megarl.serving.sampling import Sampling
from tests.support.fake_sglang import FakeSglang, generation
from tests.support.sampled import generate_sample

PROMPT = Prompt("train.jsonl:7", np.array([7, 8, 9]), "seven", "42")


def sample_from(make: Callable[[], FakeSglang], deadline_s: float = 5.0) -> Sample:
    async def go() -> Sample:
        async with make() as fake, ServerClient(fake.endpoint, attempts=3, backoff_s=0.001) as client:
            return await generate_sample(client, PROMPT, Sampling(3), deadline_s=deadline_s)

    return asyncio.run(go())


@pytest.mark.parametrize(("finish", "status"), [("stop", Status.COMPLETED), ("length", Status.TRUNCATED)])
def test_how_the_server_ended_becomes_the_status(finish: str, status: Status) -> None:
    answer = generation([5, 6, 2], finish=finish, version=4, text="42")
    sample = sample_from(lambda: FakeSglang(answer=lambda _: answer))
    assert sample.status is status
    assert (sample.id, sample.group_id, sample.response_text) == ("1/train.jsonl:7/0", "1/train.jsonl:7", "42")
    assert sample.response_ids.tolist() == [5, 6, 2]
    assert sample.rollout_logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert sample.loss_mask.tolist() == [1, 1, 1]
    assert sample.versions == (VersionSpan(4, 0, 3),)
    assert sample.num_tokens == 6


def fake_with(kind: str) -> FakeSglang:
    fake = FakeSglang()
    if kind == "aborts":
        fake.answer = lambda _: generation([5], finish="abort")
    elif kind == "refuses":
        fake.refuse["/generate"] = (503, "no workers are available")
    elif kind == "drops":
        fake.drop_next = 99
    else:
        fake.hang.add("/generate")
    return fake


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("aborts", "aborted"),
        ("refuses", "answered 503: no workers are available"),
        ("drops", "no answer"),
        ("hangs", "no answer within 0.1 s"),
    ],
)
def test_what_no_server_answers_is_a_failed_sample_that_says_why(kind: str, reason: str) -> None:
    sample = sample_from(lambda: fake_with(kind), deadline_s=0.1 if kind == "hangs" else 5.0)
    assert sample.status is Status.FAILED
    assert reason in sample.metadata["failure"]
    assert len(sample.response_ids) == len(sample.loss_mask) == len(sample.rollout_logprobs) == 0


@pytest.mark.parametrize(
    ("told", "numbers"), [(2, {PER_PASS: 1.0}), (1, {PER_PASS: 1.5}), (None, {}), (0, {PER_PASS: 3.0}), ("2", {})]
)
def test_where_a_server_guesses_ahead_it_is_counted_how_far(told: object, numbers: dict[str, float]) -> None:
    answer = generation([5, 6, 2])
    answer["meta_info"] |= {} if told is None else {"spec_verify_ct": told}
    sample = sample_from(lambda: FakeSglang(answer=lambda _: answer))
    assert sample.numbers == numbers


def test_how_far_servers_guess_is_a_metric_of_the_step() -> None:
    values = {PER_PASS: np.array([1.5, 2.5, np.nan, 9.0])}
    facts = [replace(sample_facts_of(4), numbers=values)]
    found = episode_metrics(facts, [np.array([True, True, True, False])])
    assert found == {f"rollout/{PER_PASS}": 2.0}
    check_names(found)


def sample_facts_of(count: int) -> GroupFacts:
    """A group of which nothing is of interest."""
    zeros, none = np.zeros(count, np.int64), np.zeros(count, bool)
    return GroupFacts(
        group=0,
        prompt_tokens=zeros,
        response_tokens=zeros,
        trained_tokens=zeros,
        rewards=np.zeros(count, np.float32),
        mean_nll=np.zeros(count, np.float32),
        usable=~none,
        truncated=none,
        failed=none,
        ungraded=none,
        spans=((),) * count,
    )
