"""What a server says of tokens that it is given: how it is asked by /generate, and what its answer becomes.

SGLang says it at temperature 1 whatever is asked for. Not for what a server generates (answers.py).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megarl.core.types import FloatArray, TokenArray
from megarl.serving.answers import ABOVE_ZERO, AnswerError, column, cut, field, floats, read_json
from megarl.serving.images import SentImages
from megarl.serving.sampling import prompt_key

TOP = "input_top_logprobs_"  # before the names of an answer's fields of likeliest tokens
# Mean difference of log-probs of one text up to which they are one model's. Kernels, dtypes of 16 bits and tensor-parallel sizes
# make some hundredths; two models that learned from different data, some tenths at least.
SAME_MODEL = 0.15


@dataclass(frozen=True)
class PromptScores:
    """What a server says of n tokens, each given all before it. Natural log, unscaled (temperature 1).

    logprobs: [n]. top_ids, top_logprobs: [n, k], the likeliest tokens in the place of each; k is 0 where nobody asked.
    """

    logprobs: FloatArray
    top_ids: TokenArray
    top_logprobs: FloatArray


def distance(some: Sequence[float], others: Sequence[float]) -> float:
    """How far log-probs of the same tokens by two models are apart: the mean of the absolute difference."""
    return sum(abs(a - b) for a, b in zip(some, others, strict=True)) / max(1, len(some))


def asking(
    token_ids: Sequence[int], first: int, top: int, *, alone: bool, images: SentImages | None = None
) -> dict[str, Any]:
    """The body of a request. first: of the tokens that are asked about, 1 or more. top: likeliest tokens, 0 for none.

    alone: share no cached prefix with other requests, in whose shapes it would have been computed. As base64 a likeliest token
    takes 11 bytes; as SGLang's lists, of which each is an object, about 33. images: those that the tokens are of.
    """
    assert 1 <= first < len(token_ids), (first, len(token_ids))
    seen = {} if images is None else images.body(np.asarray(token_ids, np.int32))
    return {
        **seen,
        "input_ids": seen["input_ids"].tolist() if seen else list(token_ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": first - 1,  # what it says there is of the next token
        **({"extra_key": prompt_key(np.array(token_ids, np.int32))} if alone else {}),
        **(
            {"top_logprobs_num": top, "return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
            if top
            else {}
        ),
    }


def read_scores(
    body: bytes, where: str, token_ids: Sequence[int], first: int, top: int, images: SentImages | None = None
) -> PromptScores:
    """The answer to `asking`. where: the server and endpoint, for errors. Raises AnswerError.

    In the places of images' tokens a server has what tells images apart: its log-probs there mean nothing.
    """
    meta = field(read_json(body, where), "meta_info", dict, where)
    rows = field(meta, "input_token_logprobs", list, where, "meta_info.")
    begun = first - 1
    if len(rows) != len(token_ids) - begun:
        raise cut(where, begun + len(rows), len(token_ids))
    # The last token of its vocabulary SGLang calls 0 here, which may be a placeholder of an image; its log-prob is its own.
    hidden = None if images is None else images.token
    pairs = zip(column(rows, 1), token_ids[begun:], strict=True)
    if any(told not in (sent, 0) and sent != hidden for told, sent in pairs):
        raise AnswerError(
            f"{where}: meta_info.input_token_logprobs is of other tokens than it was asked about. Is this an SGLang server, and "
            "does nothing before it change its answers?"
        )
    logprobs = floats(column(rows[1:]), "input_token_logprobs", where)
    count = len(logprobs)
    ids, values = np.zeros((count, 0), np.int32), np.zeros((count, 0), np.float32)
    if top:
        told = field(meta, f"{TOP}shape", list, where, "meta_info.")
        nothing = field(meta, f"{TOP}null_prefix", int, where, "meta_info.")
        if told != [count, top] or nothing != 1:
            raise AnswerError(
                f"{where}: meta_info.{TOP}shape is {told} behind {nothing} rows of nothing; expected is [{count}, {top}] behind "
                "1. Is this an SGLang server that returns flat top log-probs?"
            )
        ids, values = (
            _flat(meta, "idx", np.int32, (count, top), where),
            _flat(meta, "val", np.float32, (count, top), where),
        )
    if (logprobs > ABOVE_ZERO).any() or not (np.isfinite(values) & (values <= ABOVE_ZERO)).all():
        raise AnswerError(
            f"{where}: some of its log-probs are above 0, or no finite numbers. Is this an SGLang server? Where its model takes "
            "tokens for impossible, algorithm.distill_top_k has to be below the number of the others."
        )
    return PromptScores(logprobs, ids, values)


def _flat(meta: dict[str, Any], name: str, dtype: DTypeLike, shape: tuple[int, int], where: str) -> NDArray[Any]:
    text = field(meta, f"{TOP}{name}_flat_b64", str, where, "meta_info.")
    try:
        return np.frombuffer(base64.b64decode(text), dtype).reshape(shape)
    except (binascii.Error, ValueError) as error:
        raise AnswerError(f"{where}: meta_info.{TOP}{name}_flat_b64 is no table of {shape}: {error}") from error
