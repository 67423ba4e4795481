"""A stub of a server, in a process of its own: answers every request with the same turn, at once or after a while."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import orjson
from aiohttp import web

TURN = [*range(10, 25), 2]


def serve_stub(told: Any, answers_after_s: float = 0.0) -> None:
    """Serve on a free port of loopback until the process ends; told: a queue that gets the URL."""
    answer = orjson.dumps(
        {
            "text": "42",
            "output_ids": TURN,
            "meta_info": {
                "finish_reason": {"type": "stop", "matched": TURN[-1]},
                "completion_tokens": len(TURN),
                "cached_tokens": 0,
                "weight_version": "0",
                "output_token_logprobs": [[-1.0, token, None] for token in TURN],
            },
        }
    )

    async def handle(request: web.Request) -> web.Response:
        await request.read()
        if answers_after_s:
            await asyncio.sleep(answers_after_s)
        return web.Response(body=answer, content_type="application/json")

    async def application() -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", handle)
        return app

    def ready(line: str) -> None:
        return None

    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    told.put(f"http://127.0.0.1:{listener.getsockname()[1]}")
    web.run_app(application(), sock=listener, print=ready, access_log=None)
