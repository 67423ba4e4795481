"""Servers that somebody else started: what they say of themselves, and whether a run can use them.

Not for servers of the run's own (server.py), whose model and version are the run's by how they are started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from megarl.core.errors import DeadlineError, UserError
from megarl.serving.answers import AnswerError, field
from megarl.serving.client import ServerClient, ServerEndpoint, ServerError, ServerUnreachableError

ANSWER_S = 10.0
# What a tokenizer makes of this tells tokenizers apart: words, digits, code, spaces, several scripts, what is rare.
PROBE = "The 1,234 wolves\tran;\n\n  return x**2  # naïve Größe 東京は晴れ नमस्ते 🙂 <|im_end|>"


@dataclass(frozen=True)
class ModelFacts:
    """What a server serves, as it says itself.

    name: the served model's name, the last part of a path. architectures: as the model's config.json has them.
    context: longest sequence, in tokens. probe_ids: PROBE in its tokenizer. sglang: the version of SGLang.
    """

    name: str
    architectures: tuple[str, ...]
    context: int
    probe_ids: tuple[int, ...]
    sglang: str
    weight_version: str = ""


async def identify(endpoint: ServerEndpoint, deadline_s: float = ANSWER_S) -> ModelFacts:
    """Ask a server what it serves.

    Raises DeadlineError, ServerUnreachableError, ServerError (401: another key), AnswerError.
    """
    async with ServerClient(endpoint) as client:
        model = await client.ask("/model_info", deadline_s=deadline_s)
        server = await client.ask("/server_info", deadline_s=deadline_s)
        tokens = await client.ask("/tokenize", {"prompt": PROBE}, deadline_s)
    what = f"{endpoint.name} ({endpoint.url})"
    return ModelFacts(
        name=PurePath(field(model, "served_model_name", str, f"{what} /model_info")).name,
        architectures=tuple(field(model, "architectures", list, f"{what} /model_info")),
        context=field(tokens, "max_model_len", int, f"{what} /tokenize"),
        probe_ids=tuple(field(tokens, "tokens", list, f"{what} /tokenize")),
        sglang=field(server, "version", str, f"{what} /server_info"),
        weight_version=field(model, "weight_version", str, f"{what} /model_info"),
    )


def probe_ids(encode: Callable[[str], Sequence[int]]) -> tuple[int, ...]:
    """PROBE in the run's own tokenizer: to expect of a server. encode: the tokenizer's, with the special tokens that it adds."""
    return tuple(int(token) for token in encode(PROBE))


def check_external(urls: Sequence[str], key: str, expected: ModelFacts) -> None:
    """See that every server of a pool answers, and serves what the run expects; all are asked at once.

    expected: `context` is the longest sequence that the run will ask for; `weight_version` is not compared.
    Raises UserError, one paragraph of the first server that cannot be used.
    """

    async def ask_all() -> list[str | None]:
        return list(await asyncio.gather(*(_problem(ServerEndpoint("the server", url, key), expected) for url in urls)))

    for problem in asyncio.run(ask_all()):
        if problem is not None:
            raise UserError(problem)


async def _problem(endpoint: ServerEndpoint, expected: ModelFacts) -> str | None:
    """What is wrong with a server, or None."""
    url = endpoint.url
    try:
        facts = await identify(endpoint)
    except (ServerUnreachableError, DeadlineError) as error:
        return (
            f"The external server {url} does not answer: {error}. Start it, or mend its address: it must be reachable from "
            "this machine and from the nodes of the run."
        )
    except ServerError as error:
        if error.status in (401, 403):
            return f"The external server {url} refuses the key. Give the key that it was started with (--api-key)."
        return f"The external server {url} does not say what it serves, as SGLang {expected.sglang} does: {error}"
    except AnswerError as error:
        return f"The external server {url} does not say what it serves, as SGLang {expected.sglang} does: {error}"
    return differences(url, facts, expected)


def differences(url: str, facts: ModelFacts, expected: ModelFacts) -> str | None:
    """What a server serves otherwise than expected, in a paragraph; None where it can be used."""
    if facts.sglang != expected.sglang:
        return (
            f"The external server {url} is SGLang {facts.sglang}; this megarl speaks with {expected.sglang}, and weights are "
            f"sent in that version's way. Install sglang=={expected.sglang} there."
        )
    if facts.architectures != expected.architectures or facts.name != expected.name:
        return (
            f"The external server {url} serves {facts.name!r} ({', '.join(facts.architectures)}); the recipe's model is "
            f"{expected.name!r} ({', '.join(expected.architectures)}). Start it with that model; where it has another name "
            f"there, with --served-model-name {expected.name}."
        )
    if facts.probe_ids != expected.probe_ids:
        return (
            f"The external server {url} has another tokenizer than the recipe's model: it makes {len(facts.probe_ids)} tokens of "
            f"a text of which the recipe's makes {len(expected.probe_ids)}, or other ones. Start it with the same tokenizer "
            "(--tokenizer-path)."
        )
    if facts.context < expected.context:
        return (
            f"The external server {url} takes sequences of {facts.context} tokens at most; the recipe asks for up to "
            f"{expected.context}. Start it with --context-length {expected.context}, or lower data.max_prompt_tokens or "
            "rollout.max_response_tokens."
        )
    return None
