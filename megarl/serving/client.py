"""Talks HTTP to one SGLang server, or to the router in front of several: typed results, a deadline on every call.

Token ids in, token ids out. Errors name the server, the endpoint and what the server answered.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import aiohttp
import numpy as np

from megarl.core.errors import DeadlineError, MegarlError
from megarl.core.types import FloatArray, IntArray, RoutingArray, VersionSpan
from megarl.recipe.roles import ServerPart
from megarl.serving.sampling import Sampling, prompt_key

CONNECT_S = 10.0
CALL_S = 60.0
LONGEST_BACKOFF_S = 4.0
ATTEMPTS = 8  # over 20 seconds: a router that died is back by then
ANSWER_SHOWN = 500
# The router's answer where it sees no living server at the moment.
UNAVAILABLE = 503

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class ServerEndpoint:
    """Where a server (or the router) answers. tp: its tensor-parallel size: its ranks in a weight sync.

    shares_devices: its devices are ranks' as well.
    """

    name: str
    url: str
    api_key: str = field(repr=False)
    tp: int = 1
    shares_devices: bool = False


@dataclass(frozen=True)
class Generation:
    """What a server generated.

    token_ids: [R], the end token that was sampled included. logprobs: [R], natural log, of the temperature-scaled
    distribution. text: without special tokens. versions: which weights generated which of the tokens.
    routing: [P + R - 1, layers x k], the experts chosen for each token but the last, where they were asked for.
    """

    token_ids: IntArray
    logprobs: FloatArray
    text: str
    finish: FinishReason
    finish_message: str
    versions: tuple[VersionSpan, ...]
    prompt_tokens: int
    cached_tokens: int
    routing: RoutingArray | None = None


class ServerError(MegarlError):
    """A server answered with an error: `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerUnreachableError(MegarlError):
    """No connection to the server, or it broke."""


class ServerClient:
    """One server's HTTP interface. Belongs to the event loop that it is first used in; `close` ends its connections."""

    def __init__(self, endpoint: ServerEndpoint, *, attempts: int = ATTEMPTS, backoff_s: float = 0.5) -> None:
        self.endpoint = endpoint
        self._attempts = attempts
        self._backoff_s = backoff_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ServerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self, token_ids: Sequence[int] | IntArray, sampling: Sampling, deadline_s: float = 3600.0
    ) -> Generation:
        """Sample one response.

        A connection that fails, and a router without a server at the moment, are tried again, the longer
        the more `attempts`: sampling has no side effects.

        Raises DeadlineError, ServerUnreachableError, ServerError.
        """
        body = {
            "input_ids": np.asarray(token_ids).tolist(),
            "sampling_params": sampling.body(),
            "return_logprob": True,
            **({"return_routed_experts": True} if sampling.routing else {}),
            **({"extra_key": prompt_key(token_ids)} if sampling.alone else {}),
        }
        async with _deadline(deadline_s, self._what("/generate")):
            for attempt in range(self._attempts - 1):
                try:
                    return _generation(await self._post("/generate", body, deadline_s))
                except ServerUnreachableError:
                    await asyncio.sleep(min(self._backoff_s * 2**attempt, LONGEST_BACKOFF_S))
                except ServerError as error:
                    if error.status != UNAVAILABLE:
                        raise
                    await asyncio.sleep(min(self._backoff_s * 2**attempt, LONGEST_BACKOFF_S))
            return _generation(await self._post("/generate", body, deadline_s))

    async def prompt_logprobs(self, token_ids: Sequence[int] | IntArray, deadline_s: float = CALL_S) -> FloatArray:
        """Log-probs of tokens 1.. given those before: [P - 1], natural log, unscaled (temperature 1)."""
        body = {
            "input_ids": np.asarray(token_ids).tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self._post("/generate", body, deadline_s)
        # The first token has nothing before it: its log-prob is null.
        rows = answer["meta_info"]["input_token_logprobs"][1:]
        return np.array([row[0] for row in rows], dtype=np.float32)

    async def health(self, deadline_s: float = 5.0) -> bool:
        """Whether the server answers that it is well."""
        try:
            async with _deadline(deadline_s, self._what("/health")), self._open().get("/health") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, DeadlineError):
            return False

    async def weight_version(self, deadline_s: float = CALL_S) -> str:
        """Version of the weights that the server says it serves."""
        async with _deadline(deadline_s, self._what("/model_info")):
            answer = await self._send("GET", "/model_info", None, deadline_s)
        return str(answer["weight_version"])

    async def flush_cache(self, wait_s: float = 0.0, deadline_s: float = CALL_S) -> None:
        """Forget all cached prefixes. The server refuses where requests still run after wait_s."""
        await self._post(f"/flush_cache?timeout={wait_s:g}", {}, deadline_s)

    async def abort(self, deadline_s: float = CALL_S) -> None:
        """End all running requests; each is answered with what it has, and `abort`."""
        await self._post("/abort_request", {"abort_all": True}, deadline_s)

    async def pause(self, mode: Literal["abort", "retract", "in_place"] = "abort", deadline_s: float = CALL_S) -> None:
        """Stop generating; what happens to running requests is the mode's."""
        await self._post("/pause_generation", {"mode": mode}, deadline_s)

    async def resume(self, deadline_s: float = CALL_S) -> None:
        """Go on generating after `pause`."""
        await self._post("/continue_generation", {}, deadline_s)

    async def sleep(self, parts: Sequence[ServerPart], deadline_s: float = CALL_S) -> None:
        """Give back the memory of these parts; running requests are ended, new ones wait until `wake`.

        Weights are not kept: after `wake` they are garbage until all are sent anew. A part that is offloaded already breaks the
        server.
        """
        # It dies when asked while anything runs, and a request that was ended takes a moment to be gone.
        await self.pause(deadline_s=deadline_s)
        await self.flush_cache(deadline_s / 2, deadline_s)
        await self._post("/release_memory_occupation", {"tags": list(parts)}, deadline_s)

    async def wake(self, parts: Sequence[ServerPart], *, serve: bool, deadline_s: float = CALL_S) -> None:
        """Take memory for these parts, which rested. serve: requests may come again."""
        await self._post("/resume_memory_occupation", {"tags": list(parts)}, deadline_s)
        if serve:
            await self.resume(deadline_s)

    async def init_group(
        self, *, host: str, port: int, rank_offset: int, world_size: int, group: str, backend: str, deadline_s: float
    ) -> None:
        """Join the process group of a weight sync with ranks [rank_offset, rank_offset + tp)."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group,
            "backend": backend,
        }
        await self._post("/init_weights_update_group", body, deadline_s)

    async def destroy_group(self, group: str, deadline_s: float = CALL_S) -> None:
        """Leave the process group of a weight sync."""
        await self._post("/destroy_weights_update_group", {"group_name": group}, deadline_s)

    async def begin_weight_update(self, deadline_s: float = CALL_S) -> None:
        """Open the session without which an update is refused."""
        await self._post("/begin_weight_update", {}, deadline_s)

    async def end_weight_update(self, deadline_s: float = CALL_S) -> None:
        """Close the session."""
        await self._post("/end_weight_update", {}, deadline_s)

    async def update_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        deadline_s: float,
    ) -> None:
        """Receive one flattened bucket in the group's next broadcast, load it, and forget cached prefixes.

        Returns when it is loaded. The server waits until no request runs.
        """
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "load_format": "flattened_bucket",
            # With each bucket, because it is nearly free here, and a third of a second as a call of its own.
            "flush_cache": True,
        }
        await self._post("/update_weights_from_distributed", body, deadline_s)

    async def set_weight_version(self, version: int, deadline_s: float = CALL_S) -> None:
        """Have the server write this version into its answers."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._post("/update_weight_version", body, deadline_s)

    def _what(self, path: str) -> str:
        return f"{self.endpoint.name} ({self.endpoint.url}) {path}"

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                self.endpoint.url,
                headers={"Authorization": f"Bearer {self.endpoint.api_key}"},
                # The caller bounds what is in flight; deadlines are per call.
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
        return self._session

    async def _post(self, path: str, body: Mapping[str, Any], deadline_s: float) -> Any:
        async with _deadline(deadline_s, self._what(path)):
            return await self._send("POST", path, body, deadline_s)

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> Any:
        try:
            async with self._open().request(method, path, json=body) as answer:
                if answer.status != 200:
                    text = (await answer.text())[:ANSWER_SHOWN]
                    raise ServerError(f"{self._what(path)} answered {answer.status}: {text}", answer.status)
                if answer.content_type == "application/json":
                    return await answer.json()
                return await answer.text()
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnreachableError(f"{self._what(path)}: no answer: {type(error).__name__}: {error}") from error


class _deadline:
    """An asyncio.timeout whose error says what was waited for."""

    def __init__(self, seconds: float, what: str) -> None:
        self._seconds, self._what = seconds, what
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise DeadlineError(f"{self._what}: no answer within {self._seconds:g} s") from late


def _generation(answer: Mapping[str, Any]) -> Generation:
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    rows = meta["output_token_logprobs"]
    token_ids = np.array(answer["output_ids"], dtype=np.int64)
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(token_ids)}]
    return Generation(
        token_ids=token_ids,
        logprobs=np.array([row[0] for row in rows], dtype=np.float32),
        text=answer["text"],
        finish=reason["type"],
        finish_message=str(reason.get("message") or ""),
        versions=tuple(VersionSpan(int(span["version"]), int(span["start"]), int(span["end"])) for span in spans),
        prompt_tokens=int(meta["prompt_tokens"]),
        cached_tokens=int(meta["cached_tokens"]),
        routing=_routing(meta, len(token_ids)),
    )


def _routing(meta: Mapping[str, Any], num_tokens: int) -> RoutingArray | None:
    """SGLang writes the chosen experts as base64 of int32 [P + R - 1, layers, k]."""
    text = meta.get("routed_experts")
    if text is None:
        return None
    rows = int(meta["prompt_tokens"]) + num_tokens - 1
    return np.frombuffer(base64.b64decode(text), dtype=np.int32).reshape(rows, -1).astype(np.int16)
