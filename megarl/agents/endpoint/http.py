"""The endpoint as an HTTP server: keys, routes, streams, and errors in OpenAI's form. What is answered, sessions know."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

import orjson
from aiohttp import web

from megarl.agents.endpoint.forms import ChatRequest, CompletionRequest, RewardReport, read
from megarl.agents.endpoint.model import Model
from megarl.agents.endpoint.refusal import RefusedError
from megarl.agents.endpoint.replies import Answered, Reply
from megarl.core.log import get_logger

log = get_logger(__name__)

LOOPBACK = "127.0.0.1"
MOST_BODY = 2**26  # bytes
BACKLOG = 4096  # connections that wait: episodes of a step begin together
BEAT_S = 10.0  # a stream without a word for longer is taken for dead by some clients
CLOSE_S = 1.0
# The openai package's own count of how often it has asked before.
RETRY_HEADER = "x-stainless-retry-count"
STATUS_CODES: Mapping[int, str] = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Session(Protocol):
    """Whose requests a key is of. retried: the body, where the client asks again because no answer reached it."""

    async def chat(self, request: ChatRequest, retried: bytes | None, body: bytes) -> Answered:
        """Raises RefusedError."""

    async def complete(self, request: CompletionRequest, retried: bytes | None, body: bytes) -> Answered:
        """Raises RefusedError."""

    async def reward(self, report: RewardReport, retried: bytes | None, body: bytes) -> None:
        """Raises RefusedError."""


class Endpoint:
    """Answers requests of sessions, each of which has a key. Listens from `start` to `close`."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._sessions: dict[str, Session] = {}
        self._handling: dict[str, set[asyncio.Task[Any]]] = {}
        self._runner: web.AppRunner | None = None
        self._since = int(time.time())
        self.url = ""  # with /v1, as clients want it

    async def start(self, host: str = LOOPBACK, port: int = 0) -> str:
        """Listen; the base URL. port 0: any that is free. Raises OSError."""
        application = web.Application(client_max_size=MOST_BODY, middlewares=[self._in_form])
        application.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._complete),
                web.post("/v1/episode/reward", self._reward),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._one_model),
            ]
        )
        # A body that is not compressed as it says would be a trace on the console, whoever sent it.
        self._runner = web.AppRunner(
            application, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_S, auto_decompress=False
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=BACKLOG)
        await site.start()
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._runner.addresses[0][1]}/v1"
        return self.url

    async def close(self) -> None:
        """End all requests, and listen no more."""
        for key in list(self._sessions):
            self.end(key)
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def open(self, session: Session) -> str:
        """A key of its own for a session."""
        key = f"sk-megarl-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        self._handling[key] = set()
        return key

    def end(self, key: str) -> None:
        """The key opens nothing any more, and what is asked with it is cut off."""
        self._sessions.pop(key, None)
        for task in self._handling.pop(key, set()):
            task.cancel()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        async with self._session_of(request) as session:
            body, told = await _body(request)
            form = read(ChatRequest, told)
            self._model.check_name(form.model)
            answered = session.chat(form, _retried(request, body), body)
            return await self._answer(request, form, answered, chat=True)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        async with self._session_of(request) as session:
            body, told = await _body(request)
            form = read(CompletionRequest, told)
            self._model.check_name(form.model)
            answered = session.complete(form, _retried(request, body), body)
            return await self._answer(request, form, answered, chat=False)

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        async with self._session_of(request) as session:
            body, told = await _body(request)
            await session.reward(read(RewardReport, told), _retried(request, body), body)
            return _json({"object": "episode.reward"})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        async with self._session_of(request):
            return _json({"object": "list", "data": [self._card()]})

    async def _one_model(self, request: web.Request) -> web.StreamResponse:
        async with self._session_of(request):
            self._model.check_name(request.match_info["name"])
            return _json(self._card())

    def _card(self) -> dict[str, Any]:
        return {"id": self._model.name, "object": "model", "created": self._since, "owned_by": "megarl"}

    @contextlib.asynccontextmanager
    async def _session_of(self, request: web.Request) -> AsyncIterator[Session]:
        """Whose request it is; it ends with the session. Raises RefusedError."""
        given = request.headers.get("Authorization", "")
        kind, _, key = given.partition(" ")
        session = self._sessions.get(key.strip()) if kind.lower() == "bearer" else None
        if session is None:
            why = "This key opens nothing: it is wrong, or its episode has ended." if key else "There is no key."
            raise RefusedError(
                f"{why} Send `Authorization: Bearer KEY`, with the key of the episode (OPENAI_API_KEY).",
                status=401,
                code="invalid_api_key",
            )
        task, mine = asyncio.current_task(), self._handling[key.strip()]
        assert task is not None
        mine.add(task)
        try:
            yield session
        finally:
            mine.discard(task)

    async def _answer(
        self,
        request: web.Request,
        form: ChatRequest | CompletionRequest,
        answered: Any,
        *,
        chat: bool,
    ) -> web.StreamResponse:
        if not form.stream:
            return _json(Reply(form.model, await answered, chat=chat).whole())
        making: asyncio.Task[Answered] = asyncio.ensure_future(answered)
        try:
            # What is refused at once is refused by its status.
            await asyncio.wait({making}, timeout=BEAT_S)
            if making.done():
                making.result()
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            usage = form.stream_options is not None and form.stream_options.include_usage
            with contextlib.suppress(ConnectionResetError):  # who has hung up hears nothing more
                await response.prepare(request)
                while not making.done():
                    await response.write(b": the model is at it\n\n")
                    await asyncio.wait({making}, timeout=BEAT_S)
                await response.write(_events(making, form.model, chat=chat, with_usage=usage))
                await response.write_eof()
            return response
        finally:
            making.cancel()

    @web.middleware
    async def _in_form(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors as OpenAI writes them."""
        try:
            return await handler(request)
        except RefusedError as error:
            return _refused(error)
        except web.HTTPException as error:
            code = STATUS_CODES.get(error.status)
            message = f"{request.method} {request.path}: {error.reason}."
            return _refused(RefusedError(message, status=error.status, code=code))
        except Exception as error:  # a fault of ours: the client is told that there was one
            log.exception("%s %s", request.method, request.path)
            return _refused(
                RefusedError(f"A fault of the endpoint: {type(error).__name__}.", status=500, kind="server_error")
            )


async def _body(request: web.Request) -> tuple[bytes, Any]:
    """The body, and its JSON. Raises RefusedError."""
    if encoding := request.headers.get("Content-Encoding", "").strip():
        raise RefusedError(
            f"The body is compressed ({encoding}): send it as it is, without Content-Encoding.",
            status=415,
            code="invalid_body",
        )
    try:
        body = await request.read()
        return body, orjson.loads(body)
    except web.RequestPayloadError as error:
        raise RefusedError(f"The body is not what its headers say: {error}.", code="invalid_body") from error
    except orjson.JSONDecodeError as error:
        raise RefusedError(f"The body is no JSON: {error}.", code="invalid_json") from error


def _retried(request: web.Request, body: bytes) -> bytes | None:
    return body if request.headers.get(RETRY_HEADER, "0") not in ("", "0") else None


def _events(making: asyncio.Task[Answered], model: str, *, chat: bool, with_usage: bool) -> bytes:
    """A stream's events once the answer is there; of an error, that event alone."""
    try:
        reply = Reply(model, making.result(), chat=chat)
    except RefusedError as error:
        return b"data: %b\n\n" % orjson.dumps(error.body())
    chunks = [b"data: %b\n\n" % orjson.dumps(chunk) for chunk in reply.chunks(with_usage=with_usage)]
    return b"".join([*chunks, b"data: [DONE]\n\n"])


def _json(answer: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(answer), status=status, content_type="application/json", headers=headers)


def _refused(error: RefusedError) -> web.Response:
    # The openai package asks again at some of these, unless it is told not to.
    return _json(error.body(), error.status, {"x-should-retry": "false"})
