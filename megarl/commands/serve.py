"""`megarl serve`: a trained model to try, behind OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelPath = Annotated[Path, typer.Argument(help="A finished run's folder, or an HF folder.", show_default=False)]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is for everybody, with the key.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes one that is free.")]
Name = Annotated[str | None, typer.Option(help="What clients call the model; default: the folder's name.")]
ToolParser = Annotated[
    str | None,
    typer.Option(
        help="SGLang's parser of the model's calls of tools: qwen25, llama3, ...; without it there are no tools."
    ),
]
DtypeName = Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")]
Tp = Annotated[int, typer.Option(min=1, help="Devices over which the model is cut.")]
StartS = Annotated[float, typer.Option(min=1, help="Longest start of the server, seconds.")]


def serve(
    path: ModelPath,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Name = None,
    tool_parser: ToolParser = None,
    dtype: DtypeName = "bfloat16",
    tp: Tp = 1,
    start_s: StartS = 600.0,
) -> None:
    """Serve a trained model by OpenAI's API, for trying it; Ctrl-C ends it and leaves nothing.

    Starts one SGLang server with the run's hf/ and, in front of it, the endpoint that agents are trained through: chat
    completions, completions, streams, tools, and images for a model that sees. Prints the base URL and a key, which is new
    each time and stands nowhere else.

    Example: megarl serve runs/quickstart --port 8000
    """
    from megarl.run.serve import ServeSettings, known_dtype, run_serve

    run_serve(ServeSettings(path, host, port, name, tool_parser, known_dtype(dtype), tp, start_s))
