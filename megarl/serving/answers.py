"""Reads SGLang's answer of /generate, from the bytes that came to arrays. Not for how it is asked for (client.py).

A collector reads every token of a run here. SGLang has no compact form of output log-probs
(`return_flat_raw_top_logprobs` speaks of prompts alone): each token comes as a list of its own. So many lists keep the
garbage collector busy for as long as parsing takes; brackets within the rows are left out before, and one flat list is read.
"""

from __future__ import annotations

import base64
import binascii
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import orjson

from megarl.core.errors import MegarlError
from megarl.core.types import FloatArray, RoutingArray, TokenArray, VersionSpan
from megarl.core.words import shortened

FinishReason = Literal["stop", "length", "abort"]

# Where the rows begin. Within a string of JSON the quotes would be escaped: it stands nowhere else.
ROWS = b'"output_token_logprobs":[['
ROW = 3  # log-prob, token, text or null
ABOVE_ZERO = 1e-3  # what rounding may make of the log-prob of a token that is certain

# What SGLang says instead of a stop string where the drawn token is none of the vocabulary; it answers an end token in its place.
NO_TOKEN = "NaN happened"

SHOWN = 200  # characters of an answer that an error shows

REFUSAL_SHOWN = 500  # of one that is no answer

OF_RUN = "@"  # between a version and the run that sends weights

T = TypeVar("T")
_MISSING = object()


class AnswerError(MegarlError):
    """A server answered with something else than it should: names the server, the field, and what stands there."""


@dataclass(frozen=True)
class Generation:
    """What a server generated.

    token_ids: [R], the end token that was sampled included. logprobs: [R], natural log, of the temperature-scaled
    distribution. text: without special tokens. versions: which weights generated which of the tokens.
    routing: [P + R - 1, layers x k], the experts chosen for each token but the last, where they were asked for.
    matched: the token or the string that ended it, which the text leaves out; None where neither did.
    passes: of the policy that gave these tokens, the prompt's among them, where the server guesses ahead (speculative decoding);
    else None.
    most_a_pass: tokens that one pass gives at most.

    One that ends with `abort` has what there was: every token with its log-prob and its version. Those of its last pass were
    not looked at any more: one of them may be an end token, and they may be more than were asked for.
    """

    token_ids: TokenArray
    logprobs: FloatArray
    text: str
    finish: FinishReason
    versions: tuple[VersionSpan, ...]
    prompt_tokens: int
    cached_tokens: int
    routing: RoutingArray | None = None
    matched: int | str | None = None
    passes: int | None = None
    most_a_pass: int = 1

    def first(self, count: int) -> Generation:
        """The first so many tokens, with what belongs to them; the text stays that of the whole."""
        routing = None if self.routing is None else self.routing[: max(0, self.prompt_tokens + count - 1)]
        return replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            versions=clip(self.versions, count),
            routing=routing,
        )


def clip(spans: Iterable[VersionSpan], count: int) -> tuple[VersionSpan, ...]:
    """The spans of the first `count` tokens."""
    return tuple(VersionSpan(s.version, s.start, min(s.end, count)) for s in spans if s.start < count)


def read_generation(body: bytes, where: str, num_prompt: int, routed: bool = False, num_images: int = 0) -> Generation:
    """The answer of /generate. where: the server and endpoint, for errors; num_prompt: tokens that were sent.

    routed: whether the experts were asked for. num_images: that were sent beside. Raises AnswerError.
    """
    answer, flat = _without_rows(body, where)
    token_ids = _token_ids(field(answer, "output_ids", list, where), where)
    meta = field(answer, "meta_info", dict, where)
    reason = field(meta, "finish_reason", dict, where, "meta_info.")
    finish = field(reason, "type", str, where, "meta_info.finish_reason.")
    if finish not in get_args(FinishReason):
        raise AnswerError(
            f"{where} answered finish_reason.type={finish!r}; known are {', '.join(get_args(FinishReason))}."
        )
    matched = reason.get("matched")
    if matched == NO_TOKEN:
        raise AnswerError(
            f"{where} drew a token that is none of its vocabulary ({NO_TOKEN}): its logits are no numbers. Its weights may have "
            "some that are not finite, or its kernels fail; its log says more."
        )
    if flat is not None and len(flat) == ROW * len(token_ids):
        logprobs, logprobs_of = floats(flat[::ROW], "output_token_logprobs", where), flat[1::ROW]
    else:
        whole = meta if flat is None else read_json(body, where)["meta_info"]
        rows = field(whole, "output_token_logprobs", list, where, "meta_info.")
        logprobs, logprobs_of = _logprobs(rows, len(token_ids), where), column(rows, 1)
    _check_logprobs(logprobs, logprobs_of, token_ids, where)
    # A request that is ended while it waits in the server's queue is answered without these.
    counts = {"prompt_tokens": num_prompt, "cached_tokens": 0} | meta
    read = field(counts, "prompt_tokens", int, where, "meta_info.")
    wrong = read != num_prompt if num_images else read < num_prompt
    if wrong and finish != "abort":
        raise cut(where, read, num_prompt, num_images)
    routing = _routing(meta.get("routed_experts"), read + len(token_ids) - 1, where)
    if routed and finish != "abort":
        _check_told(routing, where)
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        text=field(answer, "text", str, where),
        finish=finish,  # type: ignore[arg-type]
        versions=_versions(meta, len(token_ids), where),
        prompt_tokens=read,
        cached_tokens=field(counts, "cached_tokens", int, where, "meta_info."),
        routing=routing,
        matched=matched if isinstance(matched, (int, str)) else None,
        passes=1 + passes if isinstance(passes := meta.get("spec_verify_ct"), int) else None,
        most_a_pass=_most_a_pass(meta),
    )


def _most_a_pass(meta: dict[str, Any]) -> int:
    """The guesses that were checked at once, and the token behind them."""
    passes, guesses = meta.get("spec_verify_ct"), meta.get("spec_num_proposed_drafts")
    return 1 + -(-guesses // passes) if isinstance(passes, int) and passes and isinstance(guesses, int) else 1


def cut(where: str, read: int, sent: int, num_images: int = 0) -> AnswerError:
    """That a server read fewer tokens than it was sent; with images, that it read more or fewer."""
    if num_images:
        return AnswerError(
            f"{where} answered to {read} tokens, and was asked with {sent}, those of {num_images} images among them: it makes "
            "other numbers of tokens of images, or tokenised the prompt anew. It has to have the preprocessor_config.json of "
            "model.path, and SGLANG_MM_AVOID_RETOKENIZE=1 in its environment."
        )
    return AnswerError(
        f"{where} answered to {read} tokens, and was asked with {sent}: a server with --allow-auto-truncate cuts a prompt that "
        "its context or its cache does not hold. Start it without that flag."
    )


def read_json(body: bytes, where: str) -> Any:
    """What JSON says. Raises AnswerError where it is none."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise AnswerError(f"{where} answered what is no JSON ({error}): {shown(body)}") from error


def field(answer: Any, name: str, kind: type[T], where: str, path: str = "") -> T:
    """A field of an answer, of this type. path: where the field stands, for the error: AnswerError."""
    found = answer.get(name, _MISSING) if isinstance(answer, dict) else _MISSING
    if isinstance(found, kind):
        return found
    told = "is missing" if found is _MISSING else f"is {shown(repr(found).encode())}"
    raise AnswerError(f"{where}: {path}{name} {told}; expected is a {kind.__name__}. Is this an SGLang server?")


def shown(body: bytes) -> str:
    """The beginning of an answer, for an error."""
    return shortened(body[: 4 * SHOWN].decode("utf-8", "replace"), SHOWN)


def _token_ids(ids: list[Any], where: str) -> TokenArray:
    try:
        # Unlike numpy, this refuses a float.
        return np.frombuffer(array("i", ids), np.int32)
    except (TypeError, OverflowError) as error:
        raise AnswerError(f"{where}: output_ids are no token ids: {error}") from error


def _without_rows(body: bytes, where: str) -> tuple[Any, list[Any] | None]:
    """The answer, and the rows of output log-probs as one flat list; None where they are left within the answer."""
    start, end = body.find(ROWS), -1
    if start >= 0:
        start += len(ROWS) - 2
        end = body.find(b"]]", start)
    if end < 0:
        return read_json(body, where), None
    try:
        flat = orjson.loads(b"[%b]" % body[start:end].translate(None, b"[]"))
    except orjson.JSONDecodeError:
        return read_json(body, where), None
    return read_json(b"%b[]%b" % (body[:start], body[end + 2 :]), where), flat


def _logprobs(rows: Sequence[Any], count: int, where: str) -> FloatArray:
    if len(rows) != count:
        raise AnswerError(f"{where}: meta_info.output_token_logprobs has {len(rows)} rows for {count} output_ids.")
    return floats(column(rows), "output_token_logprobs", where)


def column(rows: Sequence[Any], at: int = 0) -> list[Any]:
    """What stands there in each of these rows; None in one that has nothing there."""
    return [row[at] if isinstance(row, list) and len(row) > at else None for row in rows]


def _check_logprobs(logprobs: FloatArray, of: list[Any], token_ids: TokenArray, where: str) -> None:
    """They are the answer's tokens', and logarithms of probabilities: what else comes would be trained on without a word."""
    if of != (ids := token_ids.tolist()):
        at = next(index for index, (told, token) in enumerate(zip(of, ids, strict=True)) if told != token)
        raise AnswerError(
            f"{where}: meta_info.output_token_logprobs has the log-prob of token {of[at]!r} at position {at}, and output_ids has "
            f"token {ids[at]} there. Is this an SGLang server, and does nothing before it change its answers?"
        )
    if (logprobs > ABOVE_ZERO).any():
        at = int(logprobs.argmax())
        raise AnswerError(
            f"{where}: meta_info.output_token_logprobs has {logprobs[at]:g} at position {at}; the logarithm of a probability is "
            "at most 0. Is this an SGLang server, and does nothing before it change its answers?"
        )


def floats(values: Sequence[Any], name: str, where: str) -> FloatArray:
    """Log-probs as an array. name: of their field. Raises AnswerError where one is no number."""
    try:
        return np.frombuffer(array("f", values), np.float32)
    except TypeError as error:
        raise AnswerError(
            f"{where}: meta_info.{name} has a log-prob that is no number ({error}): one that is not finite is written as null."
        ) from error


def version_label(version: int | str, run: str) -> str:
    """What a server is told of the version of its weights: beside it, where one is given, the run that sends them."""
    return f"{version}{OF_RUN}{run}" if run else str(version)


def split_label(label: str) -> tuple[str, str]:
    """The version and the run of `version_label`; without one the run is empty."""
    version, _, run = label.partition(OF_RUN)
    return version, run


def _versions(meta: dict[str, Any], count: int, where: str) -> tuple[VersionSpan, ...]:
    rows = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": count}]
    try:
        spans = tuple(
            VersionSpan(int(split_label(str(row["version"]))[0]), int(row["start"]), int(row["end"])) for row in rows
        )
    except (TypeError, KeyError, ValueError) as error:
        raise AnswerError(
            f"{where}: weight versions are {shown(orjson.dumps(rows))}; a version is a number here. Start the server with "
            "--weight-version 0."
        ) from error
    ends = [0, *(span.end for span in spans)]
    if ends[-1] != count or any(span.start != end for span, end in zip(spans, ends, strict=False)):
        raise AnswerError(
            f"{where}: the spans {shown(orjson.dumps(rows))} of weight versions do not cover {count} tokens."
        )
    return tuple(span for span in spans if span.end > span.start)


def _check_told(routing: RoutingArray | None, where: str) -> None:
    """Whether experts that were asked for were told. Raises AnswerError."""
    if routing is None:
        raise AnswerError(
            f"{where} did not say which experts it chose (meta_info.routed_experts), which actor.routing_replay trains on: "
            "either the server runs without --enable-return-routed-experts, or a router before it leaves that out."
        )
    if routing.size and not routing.any():
        raise AnswerError(
            f"{where}: meta_info.routed_experts names expert 0 for every choice, as SGLang does where kernels choose the experts "
            "that do not tell. Start the server with --moe-runner-backend triton, or set actor.routing_replay to false."
        )


def _routing(text: str | None, rows: int, where: str) -> RoutingArray | None:
    """SGLang writes the chosen experts as base64 of int32 [P + R - 1, layers, k]."""
    if text is None:
        return None
    try:
        return np.frombuffer(base64.b64decode(text), dtype=np.int32).reshape(rows, -1).astype(np.int16)
    except (binascii.Error, ValueError, TypeError) as error:
        raise AnswerError(f"{where}: meta_info.routed_experts is no table of {rows} rows: {error}") from error


def refusal(body: bytes, leads_to: str | None, key: str | None) -> str:
    """What an error shows of an answer whose status is no success. leads_to: a redirect's target. key: not to be shown."""
    text = body.decode("utf-8", "replace")
    if leads_to:
        text = f"a redirect to {leads_to}, which is not followed: give the address that it leads to. {text}"
    if key:
        text = text.replace(key, "***")  # some servers show in their errors what they were asked
    return text[:REFUSAL_SHOWN]
