"""What `megarl serve` does: one SGLang server, and the OpenAI-compatible endpoint in front of it, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from rich.console import Console

from megarl.agents.endpoint.free import FreeSession
from megarl.agents.endpoint.http import Endpoint
from megarl.agents.endpoint.model import Model
from megarl.agents.observer import Observer
from megarl.convert.source import find_source
from megarl.core.errors import MegarlError, UserError
from megarl.core.interrupts import run_interruptibly
from megarl.core.janitor import RUN_ID_VARIABLE, register_segments
from megarl.core.platform import get_platform, num_local_devices
from megarl.core.scratch import Scratch, temporary
from megarl.data.chat import has_chat_template, load_tokenizer
from megarl.data.image_places import spellings
from megarl.models.layout_check import check_server_layout
from megarl.recipe.agent import PARSERS
from megarl.rollout.asking import Asker
from megarl.rollout.gate import Gate
from megarl.run.exported import EXPORT, exported_step
from megarl.run.preflight import CHECKPOINTS, check_model_folder
from megarl.run.servers_check import check_alone, check_calls
from megarl.serving.call_parser import CallParser
from megarl.serving.client import ServerClient
from megarl.serving.server import ProcessPlace, ServerProcess, ServerSpec
from megarl.training.run_checkpoints import Checkpoints

Dtype = Literal["float32", "bfloat16"]
KV_TOKENS = 65536  # where SGLang cannot size its cache itself
MOST_AT_ONCE = 64
ANSWER_S = 3600.0  # longest answer
LOOK_S = 0.5


@dataclass(frozen=True)
class ServeSettings:
    """What is served, and where. name: by which clients ask for it; default: the folder's. tp: devices of the server."""

    path: Path
    host: str
    port: int
    name: str | None
    tool_parser: str | None
    dtype: Dtype
    tp: int
    start_s: float


def run_serve(settings: ServeSettings) -> None:
    """`megarl serve`. Returns when it is interrupted. Raises UserError for what cannot be served, WorkerDiedError."""
    folder = servable(settings.path)
    if settings.tool_parser is not None and settings.tool_parser not in PARSERS:
        raise UserError(
            f"--tool-parser {settings.tool_parser}: there is no such parser. There are {', '.join(PARSERS)}."
        )
    config, platform = check_model_folder(folder), get_platform()
    longest = check_alone(folder, config, platform, settings.dtype)
    check_calls("--tool-parser", settings.tool_parser, config)
    check_server_layout(config, settings.tp, "--tp", pads=platform.pads_weights)
    here = num_local_devices(platform)
    if here is not None and settings.tp > here:
        raise UserError(f"--tp {settings.tp}: this machine shows {here} devices. Take at most as many.")
    check_address(settings.host, settings.port)
    tokenizer = load_tokenizer(folder)
    kv_tokens = KV_TOKENS if platform.needs_kv_tokens else None
    context = min(longest, kv_tokens or longest)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    with Scratch.open() as scratch:
        place = ProcessPlace(
            scratch.folder / "logs",
            secrets.token_hex(16),
            env={RUN_ID_VARIABLE: scratch.run_id},
            temp=temporary(scratch.folder),
        )
        spec = ServerSpec(folder.resolve(), settings.dtype, settings.tp, MOST_AT_ONCE, kv_tokens, context)
        server = ServerProcess("server 0", spec, platform, place)
        register_segments(scratch.registry, sorted(server.shm_names()))
        try:
            with console.status(f"starting SGLang with {folder}"):
                server.start()
                server.wait_ready(settings.start_s)
            register_segments(scratch.registry, sorted(server.shm_names()))
            parser = CallParser(server.endpoint, settings.tool_parser) if settings.tool_parser else None
            name = settings.name or settings.path.resolve().name
            if not has_chat_template(tokenizer):
                console.print("The tokenizer has no chat template: completions alone are answered.", markup=False)
            sight = config.vision
            observer = Observer(sight, spellings(tokenizer, sight) if sight is not None else ())
            run_interruptibly(_serve(settings, server, Model(name, tokenizer, parser, observer), context, console))
        finally:
            server.stop()


def servable(path: Path) -> Path:
    """The HF folder at a path: itself, or that of a run. Raises UserError where there is none."""
    if (path / EXPORT / "config.json").exists():
        newest = max((each.step for each in Checkpoints(path / CHECKPOINTS, keep_last=1).committed()), default=0)
        step = exported_step(path, newest)
        if newest and step != newest:
            raise UserError(
                f"{path / EXPORT} is of step {step}, and the run has gone on to step {newest} since. Serve {path / EXPORT} "
                f"itself, or the newest: megarl convert mcore-to-hf {path} exported, and megarl serve exported."
            )
        return path / EXPORT
    source = find_source(path, read=False)  # nothing of it is served
    if source.kind == "hf":
        return source.folder
    raise UserError(
        f"{path} has a Megatron checkpoint and no {EXPORT}/, which a run writes when it ends. Export it, and serve that:\n"
        f"  megarl convert mcore-to-hf {path} exported\n  megarl serve exported"
    )


def check_address(host: str, port: int) -> None:
    """Raise UserError, before a server is started, where nothing can listen."""
    try:
        [(family, kind, *_, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise _unheard(host, port, error) from error


def _unheard(host: str, port: int, error: OSError) -> UserError:
    is_elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
    advice = (
        "Give a --host that is this machine's: 127.0.0.1 is for those on it, 0.0.0.0 for everybody, with the key."
        if is_elsewhere
        else "Give another --port; 0 takes one that is free."
    )
    return UserError(f"--host {host} --port {port}: nothing can listen there: {error.strerror or error}. {advice}")


async def _serve(settings: ServeSettings, server: ServerProcess, model: Model, context: int, console: Console) -> None:
    """Answer until this task is cancelled. Raises WorkerDiedError as soon as the server has ended."""
    endpoint = Endpoint(model)
    client = ServerClient(server.endpoint, attempts=1)
    asker = Asker(client, Gate(MOST_AT_ONCE, 1), model.decode, deadline_s=ANSWER_S)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        stack.push_async_callback(model.close)
        stack.push_async_callback(endpoint.close)
        try:
            url = await endpoint.start(settings.host, settings.port)
        except OSError as error:
            raise _unheard(settings.host, settings.port, error) from error
        key = endpoint.open(FreeSession(asker, model, context))
        console.print(
            f"{model.name} answers as OpenAI's API does, until Ctrl-C:\n\n"
            f"  export OPENAI_BASE_URL={url}\n  export OPENAI_API_KEY={key}\n\n"
            f'  curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" '
            f'-d \'{{"model": "{model.name}", "messages": [{{"role": "user", "content": "1+1="}}]}}\'',
            markup=False,
        )
        while server.alive():
            await asyncio.sleep(LOOK_S)
        raise MegarlError(f"The server has ended. {server.epitaph()}")


def known_dtype(name: str) -> Dtype:
    """Raises UserError for another."""
    if name not in get_args(Dtype):
        raise UserError(f"--dtype {name}: wanted is one of {', '.join(get_args(Dtype))}.")
    return name  # type: ignore[return-value]
