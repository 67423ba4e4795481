"""A stub in the place of SGLang: answers /generate at once with made-up responses, in the bytes that SGLang would send.

    python -m bench.support.stub_server --tokens 8192

Prints its port. Nothing is generated: a few answers are rendered before the first request, and sent in turn. It speaks just
enough HTTP for one kind of request on connections that stay open, because a web framework would take more of a core than
the client that is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import numpy as np
import orjson
import typer

PROMPT_TOKENS = 64
VOCABULARY = 150_000
VARIANTS = 4
VERSION = 3


def answer(tokens: int, seed: int) -> bytes:
    """One answer of /generate: log-probs are float32 in full digits, as SGLang writes them."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCABULARY, tokens).tolist()
    logprobs = (-rng.exponential(0.5, tokens)).astype(np.float32).tolist()
    return orjson.dumps(
        {
            # English has four letters a token, about.
            "text": "so on " * (tokens * 4 // 6),
            "output_ids": ids,
            "meta_info": {
                "id": f"{seed:032x}",
                "finish_reason": {"type": "stop", "matched": ids[-1]},
                "prompt_tokens": PROMPT_TOKENS,
                "weight_version": str(VERSION),
                "num_retractions": 0,
                "input_token_logprobs": [],
                "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, ids, strict=True)],
                "output_token_logprobs_length": tokens,
                "reasoning_tokens": 0,
                "completion_tokens": tokens,
                "cached_tokens": 0,
                "weight_versions": [{"version": str(VERSION), "start": 0, "end": tokens}],
                "cached_tokens_details": None,
                "dp_rank": None,
                "e2e_latency": 0.5,
            },
        }
    )


class Stub(asyncio.Protocol):
    """A connection: counts off each request's body, and answers."""

    def __init__(self, answers: Iterator[bytes]) -> None:
        self._answers = answers
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in head else 0
            if len(self._buffer) < end + 4 + length:
                return
            self._buffer = self._buffer[end + 4 + length :]
            self._transport.write(next(self._answers))


async def serve(tokens: int) -> None:
    bodies = [answer(tokens, seed) for seed in range(VARIANTS)]
    heads = [
        f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n" for body in bodies
    ]
    answers = itertools.cycle([head.encode() + body for head, body in zip(heads, bodies, strict=True)])
    server = await asyncio.get_running_loop().create_server(lambda: Stub(answers), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def stub_server(tokens: int) -> Iterator[str]:
    """A stub in a process of its own: its URL."""
    command = [sys.executable, "-m", "bench.support.stub_server", "--tokens", str(tokens)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def main(*, tokens: Annotated[int, typer.Option(min=1, help="Tokens of each response.")] = 8192) -> None:
    """Answer on a free port until killed."""
    asyncio.run(serve(tokens))


if __name__ == "__main__":
    typer.run(main)
