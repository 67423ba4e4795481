"""A harness in a process of its own, one for each episode: started, told its row, and ended with all that it started."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from megarl.agents.environment import EnvironmentFailedError, EpisodeRow
from megarl.core import janitor
from megarl.core.end_signals import ending_of
from megarl.core.log import get_logger
from megarl.core.ray_env import without_ray
from megarl.serving.process import GUARD

log = get_logger(__name__)

EPISODE_VARIABLE = "MEGARL_EPISODE"  # marks all that an episode's harness starts, wherever it hides
TERM_S = 2.0  # for one that is ended before its time to end what it started elsewhere, such as a container
KILL_S = 5.0
MOST_OUTPUT = 4000  # characters, the last ones


async def run_command(command: Sequence[str], row: EpisodeRow, variables: Mapping[str, str]) -> None:
    """Run a harness to its end; whatever way this ends, no process of it stays.

    It has the row as JSON on its standard input, and the variables in its environment. Raises EnvironmentFailedError where it
    does not start, or ends otherwise than with exit code 0.
    """
    mark = secrets.token_hex(8)
    output = _Tail()
    # A pipe of our own: asyncio's `wait` waits for whoever holds one of its pipes, which may be a child that stays.
    reader, writer = os.pipe()
    reading = asyncio.create_task(output.read(reader))
    try:
        process = await _start(command, row, {**without_ray(), **variables, EPISODE_VARIABLE: mark}, writer)
        code = await _ended(process, mark)
    finally:
        await _read_out(reading)
    if code:
        raise EnvironmentFailedError(f"the harness ended: {ending_of(code)}", output.text())


def variables_of(url: str, key: str, model: str) -> dict[str, str]:
    """What tells clients of OpenAI's API where to go."""
    return {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "OPENAI_MODEL": model, **without_proxy(url)}


def without_proxy(url: str) -> dict[str, str]:
    """What keeps clients from taking a proxy's way to the endpoint, which does not lead there."""
    host = urlsplit(url).hostname or ""
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy", ""), host]))
    return {"NO_PROXY": direct, "no_proxy": direct}


def row_json(row: EpisodeRow) -> bytes:
    """The row as one line of JSON."""
    told = {
        "id": row.id,
        "messages": row.messages,
        "answer": row.answer,
        "fields": dict(row.fields),
        "seed": row.seed,
        **({"images": [_as_url(each) for each in row.images]} if row.images else {}),
    }
    try:
        return orjson.dumps(told, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS) + b"\n"
    except orjson.JSONEncodeError:  # whole numbers beyond 64 bits
        return json.dumps(told, default=str).encode() + b"\n"


def _as_url(image: Path | bytes) -> str:
    """A path, or the row's bytes as a data URL."""
    return str(image) if isinstance(image, Path) else f"data:;base64,{base64.b64encode(image).decode()}"


class _Tail:
    """The end of what a process prints."""

    def __init__(self) -> None:
        self._kept = b""

    async def read(self, descriptor: int) -> None:
        """Read a pipe to its end, and close it."""
        stream = asyncio.StreamReader()
        with open(descriptor, "rb", buffering=0) as pipe:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stream), pipe
            )
            with contextlib.closing(transport):
                while read := await stream.read(2**16):
                    self._kept = (self._kept + read)[-4 * MOST_OUTPUT :]

    def text(self) -> str:
        """What there is."""
        return self._kept.decode("utf-8", "replace")[-MOST_OUTPUT:]


async def _start(
    command: Sequence[str], row: EpisodeRow, environment: Mapping[str, str], output: int
) -> asyncio.subprocess.Process:
    """Start it, and close this process's end of its output. Raises EnvironmentFailedError."""
    try:
        with tempfile.TemporaryFile() as told:  # a harness need not read it
            told.write(row_json(row))
            told.seek(0)
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), *command),
                env=environment,
                stdin=told,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise EnvironmentFailedError(f"the harness did not start: {error}") from error
    finally:
        os.close(output)


async def _ended(process: asyncio.subprocess.Process, mark: str) -> int:
    """Its exit code; nothing of it is left then."""
    try:
        return await process.wait()
    except asyncio.CancelledError:
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), TERM_S)
        raise
    finally:
        await asyncio.shield(_end(process, mark))


async def _end(process: asyncio.subprocess.Process, mark: str) -> None:
    """Kill what is left of a harness: its group, and what left that. What may not be killed, such as `sudo`, is told of."""
    _signal(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), KILL_S)
    clock = asyncio.get_running_loop().time
    deadline = clock() + KILL_S
    while left := await asyncio.to_thread(janitor.processes_with, EPISODE_VARIABLE, mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if clock() > deadline:
            break
        await asyncio.sleep(0.02)
    if stays := {*left, *([process.pid] if process.returncode is None else [])}:
        log.warning("a harness could not be ended: of its processes stay %s", ", ".join(map(str, sorted(stays))))


async def _read_out(reading: asyncio.Task[None]) -> None:
    """Read the rest; somebody may hold the pipe who is not ours to end."""
    await asyncio.wait({reading}, timeout=1.0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
