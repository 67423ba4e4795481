"""Servers of a teacher that somebody else started: whether a run can ask them. Not for how a sample is asked about."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.core.errors import DeadlineError, MegarlError, UnfitServerError, UserError
from megarl.core.types import FloatArray
from megarl.core.versions import pins
from megarl.serving.answers import field
from megarl.serving.client import ServerClient, ServerEndpoint, ServerError, ServerUnreachableError
from megarl.serving.external import ANSWER_S, PROBE, longest_taken
from megarl.serving.prompt_scores import SAME_MODEL, distance

SAYS_S = 60.0  # for the first log-probs: kernels may be compiled


@dataclass(frozen=True)
class Wanted:
    """What a teacher's servers have to say. probe_ids: PROBE in the policy's tokenizer.

    context: the longest sequence, with what SGLang keeps of it. top: how many likeliest tokens; 0 for none.
    """

    probe_ids: tuple[int, ...]
    context: int
    top: int = 0


def check_teachers(urls: Sequence[str], key: str, wanted: Wanted) -> tuple[float, ...]:
    """See that every server answers, has the policy's tokens, and says their log-probs, all the same. Raises UserError.

    Returns what the first says of the probe's tokens but the first, by which the teacher is known.
    """

    async def ask_all() -> list[FloatArray | BaseException]:
        endpoints = [ServerEndpoint(f"teacher server {at}", url, key) for at, url in enumerate(urls)]
        return await asyncio.gather(*(_check(endpoint, wanted) for endpoint in endpoints), return_exceptions=True)

    said = []
    for url, found in zip(urls, asyncio.run(ask_all()), strict=True):
        if isinstance(found, UnfitServerError):
            raise UserError(str(found))
        if isinstance(found, BaseException):
            raise found
        said.append(tuple(round(float(each), 4) for each in found))
        if (apart := distance(said[0], said[-1])) > SAME_MODEL:
            raise UserError(
                f"The teacher's servers {urls[0]} and {url} do not serve the same model: their log-probs of the same text are "
                f"{apart:.2f} apart on average. Serve one teacher at all of teacher.servers.urls."
            )
    return said[0]


async def _check(endpoint: ServerEndpoint, wanted: Wanted) -> FloatArray:
    try:
        async with ServerClient(endpoint) as client:
            told = await client.ask("/tokenize", {"prompt": PROBE}, ANSWER_S)
            tokens = field(told, "tokens", list, f"{endpoint.name} /tokenize")
            server = await client.ask("/server_info", deadline_s=ANSWER_S)
            _check_like(endpoint.url, tuple(tokens), longest_taken(server, f"{endpoint.name} /server_info"), wanted)
            return (await client.prompt_scores(wanted.probe_ids, SAYS_S, top=wanted.top)).logprobs
    except UnfitServerError:
        raise
    except (ServerUnreachableError, DeadlineError) as error:
        raise UnfitServerError(
            f"The teacher's server {endpoint.url} does not answer: {error}. Start it, or mend its address in "
            "teacher.servers.urls: it must be reachable from this machine and from the nodes of the run."
        ) from error
    except MegarlError as error:
        if isinstance(error, ServerError) and error.status in (401, 403):
            raise UnfitServerError(
                f"The teacher's server {endpoint.url} refuses the key. Name the variable that holds the key it was started with "
                "(--api-key) in teacher.servers.key_env."
            ) from error
        raise UnfitServerError(
            f"The teacher's server {endpoint.url} does not say log-probs of tokens that it is given, as SGLang "
            f"{pins()['sglang']} does: {error}"
        ) from error


def _check_like(url: str, tokens: tuple[int, ...], context: int, wanted: Wanted) -> None:
    if tokens != wanted.probe_ids:
        raise UnfitServerError(
            f"The teacher's server {url} has another tokenizer than model.path: it makes {len(tokens)} tokens of a text of which "
            f"the policy's makes {len(wanted.probe_ids)}, or other ones, so that the policy's tokens mean something else to it. "
            "Serve a model of the policy's family."
        )
    if context < wanted.context:
        raise UnfitServerError(
            f"The teacher's server {url} takes sequences of {context} tokens at most, by its context or its KV cache; samples "
            f"have up to {wanted.context}, with what SGLang keeps of both. Start it with --context-length {wanted.context} and "
            "memory for as many tokens (--mem-fraction-static, --max-total-tokens), or lower data.max_prompt_tokens or "
            "rollout.max_response_tokens."
        )
