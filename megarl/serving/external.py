"""Servers that somebody else started: what they say of themselves, and whether a run can use them.

Not for servers of the run's own (server.py), whose model and version are the run's by how they are started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

from megarl.core.errors import DeadlineError, MegarlError, UnfitServerError, UserError
from megarl.recipe.stores import STORES
from megarl.serving.answers import AnswerError, field, split_label
from megarl.serving.client import ServerClient, ServerEndpoint, ServerError, ServerUnreachableError
from megarl.serving.server_models import known_as

ANSWER_S = 10.0
# What a tokenizer makes of this tells tokenizers apart: words, digits, code, spaces, several scripts, what is rare.
PROBE = "The 1,234 wolves\tran;\n\n  return x**2  # naïve Größe 東京は晴れ नमस्ते 🙂 <|im_end|>"


@dataclass(frozen=True)
class ModelFacts:
    """What a server serves, as it says itself.

    name: the served model's name, the last part of a path. architectures: as the model's config.json has them.
    context: longest sequence that it takes, in tokens. probe_ids: PROBE in its tokenizer. sglang: the version of SGLang. device:
    cuda or cpu. weight_version: of its weights now. tp: its tensor-parallel size; replicas: copies of the model that one address
    answers for; stages: of its pipeline. routing: whether it returns which experts it chose. store: the flag by which it keeps
    keys and values where no weight update empties them. run: which run sends it weights, or did when it was killed; empty: none.
    """

    name: str
    architectures: tuple[str, ...]
    context: int
    probe_ids: tuple[int, ...]
    sglang: str
    device: str = "cuda"
    weight_version: str = ""
    tp: int = 1
    replicas: int = 1
    stages: int = 1
    routing: bool = False
    store: str = ""
    run: str = ""


@dataclass(frozen=True)
class ExternalPool:
    """Servers that can be used, each with its own tensor-parallel size, and what each has to go on saying of itself."""

    endpoints: tuple[ServerEndpoint, ...]
    expected: ModelFacts

    @property
    def hosts(self) -> tuple[str, ...]:
        """Where they are."""
        return tuple(urlsplit(each.url).hostname or "" for each in self.endpoints)


async def identify(endpoint: ServerEndpoint) -> ModelFacts:
    """Ask a server what it serves.

    Raises DeadlineError, ServerUnreachableError, ServerError (401: another key), AnswerError.
    """
    async with ServerClient(endpoint) as client:
        model = await client.ask("/model_info", deadline_s=ANSWER_S)
        server = await client.ask("/server_info", deadline_s=ANSWER_S)
        tokens = await client.ask("/tokenize", {"prompt": PROBE}, ANSWER_S)
    what = f"{endpoint.name} ({endpoint.url})"
    version, run = split_label(field(model, "weight_version", str, f"{what} /model_info"))
    of_model, of_server, of_tokens = (f"{what} {path}" for path in ("/model_info", "/server_info", "/tokenize"))
    return ModelFacts(
        name=PurePath(field(model, "served_model_name", str, of_model)).name,
        architectures=tuple(known_as(str(name)) for name in field(model, "architectures", list, of_model)),
        context=longest_taken(server, of_server),
        probe_ids=tuple(field(tokens, "tokens", list, of_tokens)),
        sglang=field(server, "version", str, of_server),
        device=field(server, "device", str, of_server),
        weight_version=version,
        tp=field(server, "tp_size", int, of_server),
        replicas=field(server, "dp_size", int, of_server),
        stages=field(server, "pp_size", int, of_server),
        routing=field(server, "enable_return_routed_experts", bool, of_server),
        run=run,
        store=next((flag for flag in STORES if server.get(flag.strip("-").replace("-", "_"))), ""),
    )


def longest_taken(server: Mapping[str, Any], where: str) -> int:
    """The longest sequence, in tokens, that a server's context and its KV cache have room for, by its /server_info.

    Of both the smaller, less 6, is its max_req_input_len (SGLang 0.5.21, managers/tp_worker.py). Raises AnswerError.
    """
    return field(server, "max_req_input_len", int, where) + 6


def probe_ids(encode: Callable[[str], Sequence[int]]) -> tuple[int, ...]:
    """PROBE in the run's own tokenizer: to expect of a server. encode: the tokenizer's, with the special tokens that it adds."""
    return tuple(int(token) for token in encode(PROBE))


def check_external(urls: Sequence[str], key: str, expected: ModelFacts) -> ExternalPool:
    """See that every server of a pool answers, and serves what the run expects; all are asked at once.

    expected: as of `differences`. Raises UserError, one paragraph of the first server that cannot be used.
    """
    endpoints = [ServerEndpoint(f"external server {index}", url, key) for index, url in enumerate(urls)]

    async def ask_all() -> list[ServerEndpoint | UnfitServerError]:
        return await asyncio.gather(*(ask(endpoint) for endpoint in endpoints))

    async def ask(endpoint: ServerEndpoint) -> ServerEndpoint | UnfitServerError:
        try:
            return await suited(endpoint, expected)
        except UnfitServerError as error:
            return error

    found = asyncio.run(ask_all())
    for each in found:
        if isinstance(each, UnfitServerError):
            raise UserError(str(each))
    return ExternalPool(tuple(each for each in found if isinstance(each, ServerEndpoint)), expected)


async def suited(endpoint: ServerEndpoint, expected: ModelFacts) -> ServerEndpoint:
    """The server with its tensor-parallel size, as one of the expected run, where it is as expected. Raises UnfitServerError."""
    url = endpoint.url
    try:
        facts = await identify(endpoint)
    except (ServerUnreachableError, DeadlineError) as error:
        raise UnfitServerError(
            f"The external server {url} does not answer: {error}. Start it, or mend its address: it must be reachable from "
            "this machine and from the nodes of the run."
        ) from error
    except ServerError as error:
        if error.status in (401, 403):
            raise UnfitServerError(
                f"The external server {url} refuses the key. Name the variable that holds the key it was started with "
                "(--api-key) in rollout.servers.key_env."
            ) from error
        raise UnfitServerError(_says_nothing(url, expected, error)) from error
    except AnswerError as error:
        raise UnfitServerError(_says_nothing(url, expected, error)) from error
    if problem := differences(url, facts, expected):
        raise UnfitServerError(problem)
    return replace(endpoint, tp=facts.tp, run=expected.run)


def _says_nothing(url: str, expected: ModelFacts, error: MegarlError) -> str:
    return f"The external server {url} does not say what it serves, as SGLang {expected.sglang} does: {error}"


def differences(url: str, facts: ModelFacts, expected: ModelFacts) -> str | None:
    """What a server serves otherwise than expected, in a paragraph; None where it can be used.

    expected: `context` is the longest sequence that the run will ask for; `routing`, where it needs that; `weight_version`,
    where it matters which weights it has already; `run`, the one that may send it weights. Its tp is its own.
    """
    return (
        _other_software(url, facts, expected)
        or _other_model(url, facts, expected)
        or _other_flags(url, facts, expected)
        or _other_run(url, facts, expected)
    )


def _other_software(url: str, facts: ModelFacts, expected: ModelFacts) -> str | None:
    if facts.sglang != expected.sglang:
        return (
            f"The external server {url} is SGLang {facts.sglang}; this megarl speaks with {expected.sglang}, and weights are "
            f"sent in that version's way. Install sglang=={expected.sglang} there."
        )
    if facts.device != expected.device:
        return (
            f"The external server {url} is on {facts.device} and the run on {expected.device}: there is no way for weights "
            "between the two. Set cluster.platform, or start a server on the same kind of device."
        )
    return None


def _other_model(url: str, facts: ModelFacts, expected: ModelFacts) -> str | None:
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
    if expected.weight_version and facts.weight_version != expected.weight_version:
        return (
            f"The external server {url} says that its weights are of version {facts.weight_version!r}, and an evaluation is of "
            "the model's own: a run may have sent it others. Start it again, with --weight-version "
            f"{expected.weight_version}."
        )
    return None


def _other_run(url: str, facts: ModelFacts, expected: ModelFacts) -> str | None:
    return _of_run(url, facts.run, facts.weight_version) if facts.run not in ("", expected.run) else None


async def check_run(client: ServerClient, deadline_s: float) -> None:
    """Raises UnfitServerError where another run sends the server weights, too: both may have taken it at the same moment."""
    mine = client.endpoint.run
    version, run = split_label(await client.weight_version(deadline_s)) if mine else ("", "")
    if run not in ("", mine):
        raise UnfitServerError(_of_run(client.endpoint.url, run, version))


def _of_run(url: str, run: str, version: str) -> str:
    body = f'{{"new_version": "{version}", "abort_all_requests": false}}'
    return (
        f"The external server {url} gets its weights from the run {run}, and those of two runs would replace each other. "
        "Wait for that run, stop it, or take other servers. Where it was killed, and is not to go on, let go of the server in "
        f"its place: curl {url}/update_weight_version -H 'Content-Type: application/json' -d '{body}', with the server's key "
        "where it has one."
    )


def _other_flags(url: str, facts: ModelFacts, expected: ModelFacts) -> str | None:
    if facts.context < expected.context:
        return (
            f"The external server {url} takes sequences of {facts.context} tokens at most, by its context or its KV cache; the "
            f"recipe's take up to {expected.context}, with what SGLang keeps of both. Start it with --context-length "
            f"{expected.context} and memory for as many tokens (--mem-fraction-static, --max-total-tokens), or lower "
            "data.max_prompt_tokens or rollout.max_response_tokens."
        )
    if facts.replicas > 1 or facts.stages > 1:
        return (
            f"The external server {url} runs with --dp-size {facts.replicas} and --pp-size {facts.stages}: weights are sent to "
            "servers of one copy of the model in one stage. Start a server for each copy, cut by --tp-size alone."
        )
    if facts.store:
        return (
            f"The external server {url} runs with {facts.store}: what it stores outlives a weight sync, and it would answer with "
            "keys and values that the weights before have computed. Start it without that flag."
        )
    if expected.routing and not facts.routing:
        return (
            f"The external server {url} does not return which experts it chose, and actor.routing_replay needs that. Start it "
            "with --enable-return-routed-experts."
        )
    return None
