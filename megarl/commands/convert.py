"""`megarl convert`: weights between HF folders and checkpoints of any layout; text parts of multimodal folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from megarl.commands.options import Json, Timeout
from megarl.core.scratch import Scratch

if TYPE_CHECKING:
    from megarl.convert.job import Operation

app = typer.Typer(
    help="Weights between HF folders and Megatron checkpoints of any layout; what a checkpoint holds.\n\n"
    "Runs on CPU, without Ray: one process, or as many as the layout has ranks (--tp 2 --pp 2: four), each with its share "
    "of the model. A target appears whole or not at all. Every layout reads every checkpoint, so resharding is needed only "
    "to move one.\n\n"
    "[bold]hf-to-mcore[/bold] models/qwen ckpt/qwen --verify, [bold]mcore-to-hf[/bold] runs/x exported, "
    "[bold]reshard[/bold] runs/x ckpt/x --tp 4, [bold]inspect[/bold] runs/x, "
    "[bold]text-part[/bold] models/vl models/text, [bold]into-multimodal[/bold] runs/x/hf models/vl models/trained",
    no_args_is_help=True,
)


def _size(axis: str) -> Any:
    return typer.Option(min=1, help=f"{axis} parallel size.", rich_help_panel="Layout")


Tp = Annotated[int, _size("Tensor")]
Pp = Annotated[int, _size("Pipeline")]
Cp = Annotated[int, _size("Context")]
Ep = Annotated[int, _size("Expert")]
Etp = Annotated[int, _size("Expert-tensor")]
Vpp = Annotated[int, typer.Option(min=1, help="Virtual stages of a pipeline rank.", rich_help_panel="Layout")]
Layers = Annotated[
    int | None, typer.Option(min=1, help="Layers of that pipeline rank; default: even.", rich_help_panel="Layout")
]
SequenceParallel = Annotated[
    bool,
    typer.Option(
        "--sequence-parallel",
        help="Cut activations over tp as well; experts under tp need it.",
        rich_help_panel="Layout",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32 or bfloat16, for all weights; default: each tensor its own (FP8: bfloat16).", show_default=False
    ),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify", help="Read back what was written (HF folders by the safetensors library); compare every tensor."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a model at DST, once the new one is written.")]

Source = Annotated[Path, typer.Argument(metavar="SRC", help="HF folder, checkpoint or run.", show_default=False)]
Target = Annotated[Path, typer.Argument(metavar="DST", help="Folder to make.", show_default=False)]


def _axes(*values: int | bool | None) -> dict[str, Any]:
    names = ("tp", "pp", "cp", "ep", "etp", "vpp", "sequence_parallel", "first_stage_layers", "last_stage_layers")
    return dict(zip(names, values, strict=True))


def _convert(
    operation: Operation,
    src: Path,
    dst: Path,
    layout: dict[str, Any],
    dtype: str | None,
    settings: tuple[bool, bool, float],
    as_json: bool,
) -> NoReturn:
    with Scratch.open():
        from megarl.convert.commands import run_convert
        from megarl.convert.convert import Settings

        code = run_convert(operation, src, dst, layout, dtype, Settings(*settings), as_json=as_json)
    raise typer.Exit(code)


@app.command(name="hf-to-mcore")
def hf_to_mcore(
    src: Source,
    dst: Target,
    tp: Tp = 1,
    pp: Pp = 1,
    cp: Cp = 1,
    ep: Ep = 1,
    etp: Etp = 1,
    vpp: Vpp = 1,
    sequence_parallel: SequenceParallel = False,
    first_stage_layers: Layers = None,
    last_stage_layers: Layers = None,
    dtype: Dtype = None,
    verify: Verify = False,
    force: Force = False,
    timeout: Timeout = 21600,
    as_json: Json = False,
) -> None:
    """Write a Megatron checkpoint (weights only) of an HF folder, which SRC may also name on the hub: Qwen/Qwen3-4B.

    Example: megarl convert hf-to-mcore models/qwen ckpt/qwen --tp 2 --verify
    """
    layout = _axes(tp, pp, cp, ep, etp, vpp, sequence_parallel, first_stage_layers, last_stage_layers)
    _convert("hf-to-mcore", src, dst, layout, dtype, (verify, force, timeout), as_json)


@app.command(name="mcore-to-hf")
def mcore_to_hf(
    src: Source,
    dst: Target,
    tp: Tp = 1,
    pp: Pp = 1,
    cp: Cp = 1,
    ep: Ep = 1,
    etp: Etp = 1,
    vpp: Vpp = 1,
    sequence_parallel: SequenceParallel = False,
    first_stage_layers: Layers = None,
    last_stage_layers: Layers = None,
    dtype: Dtype = None,
    verify: Verify = False,
    force: Force = False,
    timeout: Timeout = 21600,
    as_json: Json = False,
) -> None:
    """Write an HF folder, which transformers loads, of a checkpoint's weights; adapters are merged.

    Example: megarl convert mcore-to-hf runs/quickstart exported --verify
    """
    layout = _axes(tp, pp, cp, ep, etp, vpp, sequence_parallel, first_stage_layers, last_stage_layers)
    _convert("mcore-to-hf", src, dst, layout, dtype, (verify, force, timeout), as_json)


@app.command(name="reshard")
def reshard(
    src: Source,
    dst: Target,
    tp: Tp = 1,
    pp: Pp = 1,
    cp: Cp = 1,
    ep: Ep = 1,
    etp: Etp = 1,
    vpp: Vpp = 1,
    sequence_parallel: SequenceParallel = False,
    first_stage_layers: Layers = None,
    last_stage_layers: Layers = None,
    verify: Verify = False,
    force: Force = False,
    timeout: Timeout = 21600,
    as_json: Json = False,
) -> None:
    """Write a checkpoint again at another layout, with optimizer and schedule where it has them.

    Example: megarl convert reshard runs/quickstart/checkpoints/step_000020 ckpt/tp2 --tp 2
    """
    layout = _axes(tp, pp, cp, ep, etp, vpp, sequence_parallel, first_stage_layers, last_stage_layers)
    _convert("reshard", src, dst, layout, None, (verify, force, timeout), as_json)


Multimodal = Annotated[
    Path, typer.Argument(metavar="MULTIMODAL", help="HF folder, or its name on the hub.", show_default=False)
]


@app.command(name="text-part")
def text_part(src: Multimodal, dst: Target, force: Force = False, as_json: Json = False) -> None:
    """Write the text part of a multimodal model (Gemma 3, Mistral Small 3.1, Qwen2.5-VL, ...) as an HF folder, to train it.

    Example: megarl convert text-part google/gemma-3-4b-it models/gemma-3-4b-text
    """
    with Scratch.open():
        from megarl.convert.commands import run_text_part

        run_text_part(src, dst, force=force, as_json=as_json)


@app.command(name="into-multimodal")
def into_multimodal(
    text: Annotated[
        Path, typer.Argument(metavar="TEXT", help="HF folder of the text part, trained.", show_default=False)
    ],
    src: Multimodal,
    dst: Target,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a multimodal model again, with the weights of a text folder in the place of its text part's.

    Example: megarl convert into-multimodal runs/x/hf google/gemma-3-4b-it models/gemma-3-4b-trained
    """
    with Scratch.open():
        from megarl.convert.commands import run_into_multimodal

        run_into_multimodal(text, src, dst, force=force, as_json=as_json)


@app.command(name="inspect")
def inspect_checkpoint(
    path: Annotated[Path, typer.Argument(help="HF folder, checkpoint or run.", show_default=False)],
    as_json: Json = False,
    quick: Annotated[bool, typer.Option("--quick", help="Look at sizes only; do not read all content.")] = False,
) -> None:
    """Say what a model on disk holds and whether it is whole. Exits with 1 where it is damaged.

    Example: megarl convert inspect runs/quickstart --json
    """
    from megarl.convert.commands import run_inspect

    raise typer.Exit(run_inspect(path, as_json=as_json, quick=quick))
