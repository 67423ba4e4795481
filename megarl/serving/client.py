"""Talks HTTP to one SGLang server, or to the router in front of several: typed results, a deadline on every call.

Token ids in, token ids out. Errors name the server, the endpoint and what the server answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import orjson

from megarl.core.errors import DeadlineError, MegarlError
from megarl.core.log import get_logger
from megarl.core.types import TokenArray
from megarl.serving import answers
from megarl.serving.answers import Generation, read_generation
from megarl.serving.deadline import deadline
from megarl.serving.images import SentImages
from megarl.serving.prompt_scores import PromptScores, asking, read_scores
from megarl.serving.sampling import Sampling, prompt_key

if TYPE_CHECKING:
    import aiohttp  # where a call is made: loading it takes a moment, and many processes only hand endpoints on

    from megarl.recipe.roles import ServerPart

log = get_logger(__name__)

CONNECT_S = 10.0
CALL_S = 60.0
LONGEST_BACKOFF_S = 4.0
ATTEMPTS = 8  # over 20 seconds: a router that died is back by then
STRAGGLERS_S = 2.0, 4.0  # what was ended is gone within moments; what is not came later, and is ended as well
UNAVAILABLE = 503  # the router's answer where it sees no living server at the moment
# An answer of 8,192 tokens has about 350 kB: one that fits is not read in many starts and stops.
READ_BYTES = 2**20
JSON = {"Content-Type": "application/json"}
# Of a weight update: SGLang would load the same tensors into a draft, which guesses ahead.
OF_MODEL = {"selector": "target"}

Tokens = Sequence[int] | TokenArray
# What a pause does to requests that run; see `ServerClient.pause`.
PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True)
class ServerEndpoint:
    """Where a server (or the router) answers. tp: its tensor-parallel size: its ranks in a weight sync.

    api_key: empty for one that wants none. shares_devices: its devices are ranks' as well. since: what tells one that came back
    at the same address from the one before. adapter: LoRA adapters that requests are answered with; none where empty. run: who
    sends it weights, as `answers.version_label` has it, where another run could, too. loader: what it calls of its own at the
    beginning of each weight update (`sglang_kv_scales`); nothing where empty.
    """

    name: str
    url: str
    api_key: str = field(repr=False)
    tp: int = 1
    shares_devices: bool = False
    since: float = 0.0
    adapter: str = ""
    run: str = ""
    loader: str = ""


class ServerError(MegarlError):
    """A server answered with an error: `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerUnreachableError(MegarlError):
    """No connection to the server, or it broke."""


def nobody_there(error: MegarlError) -> bool:
    """Whether a request met no server at all: a connection that failed, or a router that sees none at the moment."""
    return isinstance(error, ServerUnreachableError) or (isinstance(error, ServerError) and error.status == UNAVAILABLE)


class ServerClient:
    """One server's HTTP interface. Belongs to the event loop that it is first used in; `close` ends its connections."""

    def __init__(self, endpoint: ServerEndpoint, *, attempts: int = ATTEMPTS, backoff_s: float = 0.5) -> None:
        self.endpoint = endpoint
        self._adapter = {"lora_path": endpoint.adapter} if endpoint.adapter else {}
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
        self,
        token_ids: Tokens,
        sampling: Sampling,
        deadline_s: float = 3600.0,
        *,
        gives_up: Callable[[], bool] = lambda: False,
        images: SentImages | None = None,
    ) -> Generation:
        """Sample one response, or go on with one.

        What comes back is what follows the tokens. A request that the server ends early comes back with `finish` "abort" and the
        tokens that it has.

        A connection that fails, and a router without a server at the moment, are tried again, the longer
        the more `attempts`: sampling has no side effects. gives_up: asked before each try but the first; where it says so,
        what went wrong is raised instead. images: those that the tokens have.

        Raises DeadlineError, ServerUnreachableError, ServerError, AnswerError.
        """
        ids = np.ascontiguousarray(token_ids, np.int32)
        body = orjson.dumps(
            {
                "input_ids": ids,
                "sampling_params": sampling.body(),
                "return_logprob": True,
                **self._adapter,
                **({"return_routed_experts": True} if sampling.routing else {}),
                **({"extra_key": prompt_key(ids, images.pngs if images else ())} if sampling.alone else {}),
                **(images.body(ids) if images else {}),
            },
            option=orjson.OPT_SERIALIZE_NUMPY,
        )
        what = self._what("/generate")
        asked = len(ids), sampling.routing, len(images.pngs) if images else 0
        async with deadline(deadline_s, what):
            for attempt in range(self._attempts - 1):
                try:
                    return read_generation(await self._send("POST", "/generate", body), what, *asked)
                except (ServerUnreachableError, ServerError) as error:
                    if not nobody_there(error):
                        raise
                    await asyncio.sleep(min(self._backoff_s * 2**attempt, LONGEST_BACKOFF_S))
                    if gives_up():
                        raise
            return read_generation(await self._send("POST", "/generate", body), what, *asked)

    async def prompt_scores(
        self,
        token_ids: Tokens,
        deadline_s: float = CALL_S,
        *,
        first: int = 1,
        top: int = 0,
        alone: bool = False,
        images: SentImages | None = None,
    ) -> PromptScores:
        """What the server says of tokens first.. given those before; see `asking`. Raises as `ask` does."""
        ids = np.asarray(token_ids).tolist()
        body = asking(ids, first, top, alone=alone, images=images) | self._adapter
        answer = await self._post("/generate", body, deadline_s)
        return read_scores(answer, self._what("/generate"), ids, first, top, images)

    async def health(self, deadline_s: float = 5.0) -> bool:
        """Whether the server answers that it is well."""
        try:
            return await self.well(deadline_s)
        except ServerUnreachableError:
            return False

    async def well(self, deadline_s: float) -> bool:
        """Whether the server answers that it is well. Raises ServerUnreachableError where nobody listens."""
        try:
            async with deadline(deadline_s, self._what("/health")):
                await self._send("GET", "/health", None)
        except (ServerError, DeadlineError):
            return False
        return True

    async def weight_version(self, deadline_s: float = CALL_S) -> str:
        """Version of the weights that the server says it serves."""
        told = await self.ask("/model_info", deadline_s=deadline_s)
        return answers.field(told, "weight_version", str, self._what("/model_info"))

    async def ask(self, path: str, body: Mapping[str, Any] | None = None, deadline_s: float = CALL_S) -> Any:
        """What the server says of itself, as JSON: a GET, or a POST where there is a body.

        Raises DeadlineError, ServerUnreachableError, ServerError, AnswerError.
        """
        what = self._what(path)
        async with deadline(deadline_s, what):
            method, sent = ("GET", None) if body is None else ("POST", orjson.dumps(body))
            return answers.read_json(await self._send(method, path, sent), what)

    async def flush_cache(self, wait_s: float = 0.0, deadline_s: float = CALL_S) -> None:
        """Forget all cached prefixes. The server refuses where requests still run after wait_s."""
        await self._post(f"/flush_cache?timeout={wait_s:g}", {}, deadline_s)

    async def abort(self, deadline_s: float = CALL_S) -> None:
        """End the requests that run or wait in the server's queue; each is answered with what it has, and `abort`.

        Returns before they are answered. One that runs gets a last token first. One that was taken back to the queue
        (`retract`) is answered with what the server had told of it: SGLang tells at every 50th token. Requests that came
        while the server is paused are not touched: they wait before the queue until `resume`.
        """
        await self._post("/abort_request", {"abort_all": True}, deadline_s)

    async def pause(self, mode: PauseMode = "abort", deadline_s: float = CALL_S) -> None:
        """Stop generating until `resume`. Requests that come meanwhile wait at the server and are then served.

        Requests that run: `abort` ends them with what they have, and returns when the last is gone, in whole seconds.
        `retract` takes them back to the queue at once and gives up their KV: cached prefixes can be flushed, and on `resume`
        they are computed anew, by the weights of then. `in_place` holds them as they are with their KV, and they go on with
        it; the cache must not be flushed meanwhile: see `update_from_distributed`.

        A router does not pass this on: it is said to each server.
        """
        await self._post("/pause_generation", {"mode": mode}, deadline_s)

    async def resume(self, deadline_s: float = CALL_S) -> None:
        """Go on generating after `pause`: requests that it held or took back first, then those that wait."""
        await self._post("/continue_generation", {}, deadline_s)

    async def sleep(self, parts: Sequence[ServerPart], deadline_s: float = CALL_S) -> None:
        """Give back the memory of these parts; running requests are ended, new ones wait until `wake`.

        Weights are not kept: after `wake` they are garbage until all are sent anew. A part that is offloaded already breaks the
        server.
        """
        # It dies when asked while anything runs, and a request that was ended takes a moment to be gone. Pausing by "abort"
        # would wait for that, too, but looks again only after a second, which every step would lose.
        await self.empty(deadline_s)
        await self.pause("retract", deadline_s)
        await self._post("/release_memory_occupation", {"tags": list(parts)}, deadline_s)

    async def empty(self, deadline_s: float) -> None:
        """End all requests, and those that were on their way when the first were ended, which would run to their end."""
        for wait_s in STRAGGLERS_S:
            await self.abort(deadline_s)
            try:
                await self.flush_cache(min(wait_s, deadline_s / 2), deadline_s)
            except ServerError as error:
                log.info("%s: ended once more", error)
            else:
                return
        await self.abort(deadline_s)
        await self.flush_cache(deadline_s / 2, deadline_s)

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
        await self._post("/begin_weight_update", OF_MODEL, deadline_s)

    async def end_weight_update(self, deadline_s: float = CALL_S) -> None:
        """Close the session."""
        await self._post("/end_weight_update", {}, deadline_s)

    async def close_weight_update(self, deadline_s: float = CALL_S) -> None:
        """Close the session if there is one; a server that has none says so, and is well."""
        try:
            await self.end_weight_update(deadline_s)
        except ServerError as error:
            if "no weight-update session is open" not in str(error):
                raise

    async def update_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        deadline_s: float,
        *,
        flattened: bool = True,
        flush_cache: bool = True,
    ) -> None:
        """Receive tensors in the group's next broadcasts and load them. Returns when they are loaded.

        flattened: all in one broadcast, end to end as bytes; else in one each. flush_cache: forget cached prefixes as well.
        A server that is paused with requests held `in_place` dies of that: False keeps their KV, which the old weights made, and
        every cached prefix with it. One that is not paused waits until no request runs; a paused one loads at once.
        """
        body = OF_MODEL | {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "load_format": "flattened_bucket" if flattened else None,
            # With each bucket, because it is nearly free here, and a third of a second as a call of its own.
            "flush_cache": flush_cache,
        }
        await self._post("/update_weights_from_distributed", body, deadline_s)

    async def update_from_tensors(
        self, payloads: Sequence[str], deadline_s: float, *, flush_cache: bool = True
    ) -> None:
        """Load one flattened bucket from memory that the server can reach. Returns when it is loaded.

        payloads: for each tensor-parallel rank of the server, a pickled description of the memory in base64; SGLang's
        unpickler lets little through (`sync/segments.py` makes them). flush_cache: see `update_from_distributed`.
        """
        body = OF_MODEL | {"serialized_named_tensors": list(payloads), "load_format": "flattened_bucket"}
        await self._post("/update_weights_from_tensor", body | {"flush_cache": flush_cache}, deadline_s)

    async def update_from_disk(
        self, folder: Path, version: int, deadline_s: float, *, flush_cache: bool = True
    ) -> None:
        """Load all tensors of the safetensors in a folder that the server sees, and serve them as this version.

        Tensors that are not there stay as they are. It is no part of a session. The server calls its model what the folder is
        called from then on. A file that it cannot read leaves it with a mixture: they have to be checked before. flush_cache: see
        `update_from_distributed`.
        """
        body = {
            "model_path": str(folder),
            "load_format": "safetensors",
            "weight_version": answers.version_label(version, self.endpoint.run),
            "flush_cache": flush_cache,
        }
        await self._post("/update_weights_from_disk", body, deadline_s)

    async def set_weight_version(self, version: int | str, deadline_s: float = CALL_S) -> None:
        """Have the server write this version, and the endpoint's run, into its answers for tokens that it makes from now on."""
        body = {"new_version": answers.version_label(version, self.endpoint.run), "abort_all_requests": False}
        await self._post("/update_weight_version", body, deadline_s)

    def _what(self, path: str) -> str:
        return f"{self.endpoint.name} ({self.endpoint.url}) {path}"

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            key = self.endpoint.api_key
            self._session = aiohttp.ClientSession(
                self.endpoint.url,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                # The caller bounds what is in flight; deadlines are per call.
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                read_bufsize=READ_BYTES,
            )
        return self._session

    async def _post(self, path: str, body: Mapping[str, Any], deadline_s: float) -> bytes:
        async with deadline(deadline_s, self._what(path)):
            return await self._send("POST", path, orjson.dumps(body))

    async def _send(self, method: str, path: str, body: bytes | None) -> bytes:
        import aiohttp

        try:
            headers = JSON if body is not None else None
            # A redirect would take prompts elsewhere, and of most kinds make a GET of a POST, which changes nothing.
            asked = self._open().request(method, path, data=body, headers=headers, allow_redirects=False)
            async with asked as answer:
                told = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnreachableError(f"{self._what(path)}: no answer: {type(error).__name__}: {error}") from error
        if answer.status != 200:
            text = answers.refusal(told, answer.headers.get("Location"), self.endpoint.api_key)
            raise ServerError(f"{self._what(path)} answered {answer.status}: {text}", answer.status)
        return told
