"""The comparison of log-probs, on numbers written by hand, and the probe against fake servers."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from megarl.core.errors import SyncError
from megarl.data.pack import assemble
from megarl.serving.images import SentImages
from megarl.sync.verify import ProbeAnswers, probe_servers, probe_shard, split_column, verify
from tests.support.fake_sglang import FakeSglang, generation

PROBE = [[5, 6, 7], [8, 9]]


def rows(*values: list[float]) -> list[np.ndarray]:
    return [np.array(value, np.float32) for value in values]


def test_the_largest_difference_over_all_servers_is_returned() -> None:
    trainer = rows([-1.0, -2.0], [-3.0])
    servers = {"server 0": rows([-1.0, -2.0], [-3.25]), "server 1": rows([-1.5, -2.0], [-3.0])}
    assert verify(trainer, servers, 0.5, 7) == 0.5


def test_a_difference_over_the_tolerance_stops_with_every_servers_number() -> None:
    servers = {"server 0": rows([-1.0]), "server 1": rows([-1.5])}
    with pytest.raises(SyncError, match=r"Weight version 7 did not arrive .* on server 1: .* server 0 0, server 1 0.5"):
        verify(rows([-1.0]), servers, 1e-3, 7)


def test_not_a_number_is_wrong() -> None:
    with pytest.raises(SyncError, match="server 0 nan"):
        verify(rows([-1.0]), {"server 0": rows([float("nan")])}, 1e9, 7)
    # Also in a later sequence, behind one that is right.
    with pytest.raises(SyncError, match="server 0 nan"):
        verify(rows([-1.0], [-1.0]), {"server 0": rows([-1.0], [float("nan")])}, 1e9, 7)


@pytest.mark.parametrize("answer", [[-1.0], [-1.0, -1.0], [-1.0] * 4])
def test_an_answer_of_another_length_is_wrong(answer: list[float]) -> None:
    """One number would be held against each of the trainer's."""
    with pytest.raises(SyncError, match="server 0 nan"):
        verify(rows([-1.0] * 3), {"server 0": rows(answer)}, 1e9, 7)


def test_nothing_to_compare_is_no_proof() -> None:
    with pytest.raises(SyncError, match="no server answered"):
        verify(rows([-1.0]), {}, 1.0, 7)


def test_the_probe_is_one_label_aligned_micro_batch() -> None:
    plan, block = probe_shard(PROBE)
    (mini,) = assemble(plan, [block]).mini_batches
    (micro,) = mini.micro_batches
    assert micro.tokens.tolist() == [5, 6, 7, 8, 9]
    assert micro.labels.tolist() == [6, 7, 0, 9, 0]
    assert micro.loss_mask.tolist() == [1, 1, 0, 1, 0]
    assert micro.cu_seqlens.tolist() == [0, 3, 5]
    assert micro.weights.tolist() == [0] * 5


def test_a_sequence_with_images_is_the_last_and_nothing_is_said_of_their_tokens() -> None:
    probe, images = [[5, 6, 7], [8, 3, 3, 9, 4]], SentImages((b"a png",), 3)
    plan, block = probe_shard(probe, images)
    (mini,) = assemble(plan, [block]).mini_batches
    (micro,) = mini.micro_batches
    assert micro.tokens.tolist() == [5, 6, 7, 8, 3, 3, 9, 4]
    assert micro.images == ((), (b"a png",))
    column = np.array([-1, -2, 0, -70, -80, -3, -4, 0], np.float32)
    assert [row.tolist() for row in split_column(column, probe, images)] == [[-1, -2], [-3, -4]]

    def answer(body: dict[str, Any]) -> dict[str, object]:
        # A server has what tells images apart in the places of their tokens, and there are as many as the image has squares.
        assert ("image_data" in body) == (body["input_ids"] == [8, 3, 9, 4]), body
        tokens = [8, 70001, 70001, 9, 4] if "image_data" in body else body["input_ids"]
        made = generation([])
        made["meta_info"]["input_token_logprobs"] = [
            [None if at == 0 else -float(at), token, None] for at, token in enumerate(tokens)
        ]
        return made

    async def go() -> ProbeAnswers:
        async with FakeSglang("server 0", answer) as fake:
            return await probe_servers([fake.endpoint], probe, 5.0, images)

    answers = asyncio.run(go())
    assert answers.failed == {}
    assert [row.tolist() for row in answers.logprobs["server 0"]] == [[-1, -2], [-3, -4]]


def test_the_trainers_column_is_cut_at_the_sequences() -> None:
    column = np.array([-1, -2, 0, -3, 0], np.float32)
    assert [row.tolist() for row in split_column(column, PROBE)] == [[-1, -2], [-3]]


def test_a_server_that_gives_no_answer_is_named_and_the_others_are_kept() -> None:
    def answer(body: dict[str, list[int]]) -> dict[str, object]:
        made = generation([])
        made["meta_info"]["input_token_logprobs"] = [
            [None if i == 0 else -0.5, t, None] for i, t in enumerate(body["input_ids"])
        ]
        return made

    async def go() -> ProbeAnswers:
        async with FakeSglang("server 0", answer) as well, FakeSglang("server 1") as ill:
            ill.refuse["/generate"] = (500, "broken")
            return await probe_servers([well.endpoint, ill.endpoint], PROBE, 5.0)

    answers = asyncio.run(go())
    assert [row.tolist() for row in answers.logprobs["server 0"]] == [[-0.5, -0.5], [-0.5]]
    assert list(answers.logprobs) == ["server 0"]
    assert "answered 500: broken" in answers.failed["server 1"]
