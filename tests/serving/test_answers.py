"""What is read of a server's answer, and what is said of one that is not as it should be."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.types import VersionSpan
from megarl.serving.answers import AnswerError, clip, read_generation
from tests.support.fake_sglang import generation

WHERE = "server 0 (http://h:1) /generate"
FLOATS = st.floats(-50, 0, width=32)


@given(st.lists(st.tuples(FLOATS, st.integers(0, 200_000)), max_size=60), st.text(max_size=20))
def test_what_was_sent_is_read_whatever_the_text_and_however_it_is_spaced(
    rows: list[tuple[float, int]], text: str
) -> None:
    text = f'{text}"output_token_logprobs":[[{text}]]'  # as a model may write that has read this
    answer = generation([token for _, token in rows], text=text)
    answer["meta_info"]["output_token_logprobs"] = [[value, token, None] for value, token in rows]
    for body in (orjson.dumps(answer), json.dumps(answer).encode()):
        read = read_generation(body, WHERE, 3)
        assert read.token_ids.tolist() == [token for _, token in rows]
        assert read.logprobs.tolist() == [value for value, _ in rows]
        assert (read.token_ids.dtype, read.logprobs.dtype) == (np.int32, np.float32)
        assert (read.text, read.finish) == (text, "stop")


def test_a_request_that_was_ended_in_the_queue_has_what_the_server_told_of_it() -> None:
    answer = generation([5, 6], finish="abort")
    del answer["meta_info"]["cached_tokens"]
    read = read_generation(orjson.dumps(answer), WHERE, 7)
    assert (read.finish, read.prompt_tokens, read.cached_tokens) == ("abort", 7, 0)
    assert read.token_ids.tolist() == [5, 6] and read.versions == (VersionSpan(0, 0, 2),)


def test_one_without_tokens_has_no_spans() -> None:
    read = read_generation(orjson.dumps(generation([], finish="abort")), WHERE, 3)
    assert len(read.token_ids) == len(read.logprobs) == len(read.versions) == 0


@pytest.mark.parametrize("matched", [2, "\n", None])
def test_what_ended_it_is_kept(matched: int | str | None) -> None:
    answer = generation([5, 2])
    answer["meta_info"]["finish_reason"]["matched"] = matched
    assert read_generation(orjson.dumps(answer), WHERE, 3).matched == matched


def test_its_first_tokens_have_their_log_probs_spans_and_routing() -> None:
    answer = generation([5, 6, 7])
    answer["meta_info"]["weight_versions"] = [
        {"version": "1", "start": 0, "end": 2},
        {"version": "2", "start": 2, "end": 3},
    ]
    routing = np.arange(10, dtype=np.int32)  # 3 + 3 - 1 tokens, one layer, two experts
    answer["meta_info"]["routed_experts"] = base64.b64encode(routing.tobytes()).decode()
    read = read_generation(orjson.dumps(answer), WHERE, 3).first(2)
    assert (read.token_ids.tolist(), read.logprobs.tolist()) == ([5, 6], [-1.0, -2.0])
    assert read.versions == (VersionSpan(1, 0, 2),) == clip(read.versions, 9)
    assert read.routing is not None and read.routing.tolist() == routing[:8].reshape(4, 2).tolist()


def changed(path: str, value: Any) -> dict[str, Any]:
    answer: dict[str, Any] = generation([5, 6])
    at: Any = answer
    *folders, last = path.split(".")
    for name in folders:
        at = at[name]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return answer


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("output_ids", None, "output_ids is missing"),
        ("meta_info.prompt_tokens", "many", "meta_info.prompt_tokens is 'many'; expected is a int"),
        ("meta_info.prompt_tokens", 2, "answered to 2 tokens, and was asked with 3: .* --allow-auto-truncate"),
        ("meta_info.cached_tokens", [1], r"meta_info.cached_tokens is \[1\]; expected is a int"),
        ("output_ids", [1.5, 2], "output_ids are no token ids"),
        ("text", 3, "text is 3; expected is a str"),
        ("meta_info", [], r"meta_info is \[\]; expected is a dict"),
        ("meta_info.finish_reason", None, "meta_info.finish_reason is missing"),
        ("meta_info.finish_reason.type", "tired", "type='tired'; known are stop, length, abort"),
        ("meta_info.finish_reason.matched", "NaN happened", "drew a token that is none of its vocabulary"),
        ("meta_info.output_token_logprobs", None, "meta_info.output_token_logprobs is missing"),
        ("meta_info.output_token_logprobs", [[-1.0, 5, None]], "has 1 rows for 2 output_ids"),
        ("meta_info.output_token_logprobs", [[None, 5, None], [-1.0, 6, None]], "log-prob that is no number"),
        ("meta_info.output_token_logprobs", [3, 4], "log-prob that is no number"),
        ("meta_info.output_token_logprobs", [[-1.0, 5, None], [0.7, 6, None]], "has 0.7 at position 1; .* at most 0"),
        (
            "meta_info.output_token_logprobs",
            [[-1.0, 5, None], [-1.0, 7, None]],
            "of token 7 at position 1, .* token 6 there",
        ),
        ("meta_info.output_token_logprobs", [[-1.0, 6], [-1.0, 5]], "of token 6 at position 0, .* token 5 there"),
        ("meta_info.weight_versions", [{"version": "v", "start": 0, "end": 2}], "--weight-version 0"),
        ("meta_info.weight_versions", [{"version": "1", "start": 0, "end": 1}], "do not cover 2 tokens"),
        ("meta_info.routed_experts", "AAAA", "routed_experts is no table of 4 rows"),
    ],
)
def test_a_malformed_answer_names_the_server_and_the_field(path: str, value: Any, told: str) -> None:
    body = changed(path, value)
    for sent in (orjson.dumps(body), json.dumps(body).encode()):
        with pytest.raises(AnswerError, match=told) as caught:
            read_generation(sent, WHERE, 3)
        assert WHERE in str(caught.value)


def test_experts_that_kernels_did_not_tell_of_are_no_routing() -> None:
    untold = base64.b64encode(bytes(4 * 8)).decode()
    body = orjson.dumps(changed("meta_info.routed_experts", untold))
    with pytest.raises(AnswerError, match=r"expert 0 for every choice.*--moe-runner-backend triton"):
        read_generation(body, WHERE, 3, routed=True)
    ended = changed("meta_info.routed_experts", untold)
    ended["meta_info"]["finish_reason"] = {"type": "abort"}
    assert read_generation(orjson.dumps(ended), WHERE, 3, routed=True).routing is not None


def test_a_token_that_is_certain_may_have_what_rounding_makes_of_its_log_prob() -> None:
    body = changed("meta_info.output_token_logprobs", [[1.2e-7, 5, None], [0, 6, None]])
    assert read_generation(orjson.dumps(body), WHERE, 3).logprobs.tolist() == pytest.approx([1.2e-7, 0])


@pytest.mark.parametrize("body", [b"", b"<html>no such page</html>", orjson.dumps(generation([5, 6]))[:-9], b"[1]"])
def test_what_is_no_answer_at_all_is_shown(body: bytes) -> None:
    with pytest.raises(AnswerError, match="server 0"):
        read_generation(body, WHERE, 3)
