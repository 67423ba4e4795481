"""The command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console

from megarl import cli_launch
from megarl.core.errors import MegarlError

if TYPE_CHECKING:
    from megarl.convert.job import Operation

app = typer.Typer(
    help="Reinforcement-learning post-training of large language models on Megatron-core, SGLang and Ray.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
recipe_app = typer.Typer(help="Look at recipes.", no_args_is_help=True)
app.add_typer(recipe_app, name="recipe")
app.add_typer(cli_launch.app)  # submit, status, logs, cancel
convert_app = typer.Typer(
    help="Weights between HF folders and Megatron checkpoints of any layout; what a checkpoint holds.\n\n"
    "Runs on CPU, without Ray: one process, or as many as the layout has ranks (--tp 2 --pp 2: four), each with its share "
    "of the model. A target appears whole or not at all. Every layout reads every checkpoint, so resharding is needed only "
    "to move one.\n\n"
    "[bold]hf-to-mcore[/bold] models/qwen ckpt/qwen --verify, [bold]mcore-to-hf[/bold] runs/x exported, "
    "[bold]reshard[/bold] runs/x ckpt/x --tp 4, [bold]inspect[/bold] runs/x",
    no_args_is_help=True,
)
app.add_typer(convert_app, name="convert")

RecipePath = Annotated[Path, typer.Argument(help="YAML recipe; recipes/ holds examples.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Values that override the recipe's, as key.path=value: run.seed=2 train.steps=10.", show_default=False
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the last committed checkpoint of this run's folder.")
]

GoOn = Annotated[
    bool,
    typer.Option(
        "--continue",
        help="As --resume where there is a checkpoint; else begin, in place of an earlier start that committed none.",
    ),
]


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
Timeout = Annotated[float, typer.Option(min=1, help="Seconds for all of it.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]
Source = Annotated[Path, typer.Argument(metavar="SRC", help="HF folder, checkpoint or run.", show_default=False)]
Target = Annotated[Path, typer.Argument(metavar="DST", help="Folder to make.", show_default=False)]


@app.command()
def train(recipe: RecipePath, overrides: Overrides = None, resume: Resume = False, go_on: GoOn = False) -> None:
    """Train a policy by reinforcement learning.

    Checks the whole recipe first (keys, batch sizes, model folder, data rows, reward function) and refuses it with one
    paragraph and exit code 2. Then starts the servers and ranks, trains, and leaves in the run's folder: metrics.jsonl,
    curve.png, logs/, samples/, checkpoints/ and hf/, which transformers loads.

    Example: megarl train recipes/quickstart.yaml run.seed=2 train.steps=20
    """
    from megarl.commands import run_train

    run_train(recipe, overrides or [], resume, go_on)


@app.command()
def sft(recipe: RecipePath, overrides: Overrides = None, resume: Resume = False, go_on: GoOn = False) -> None:
    """Train a model on demonstrations, on the same Megatron engine.

    Rows hold chats (`messages`) or a prompt and a response; only the assistant's tokens are trained on.

    Example: megarl sft recipes/quickstart_sft.yaml
    """
    from megarl.commands import run_supervised
    from megarl.recipe.supervised import SftRecipe

    run_supervised(SftRecipe, recipe, overrides or [], resume, go_on)


@app.command()
def rm(recipe: RecipePath, overrides: Overrides = None, resume: Resume = False, go_on: GoOn = False) -> None:
    """Train a reward model on pairs of a chosen and a rejected answer (Bradley-Terry).

    Rows hold `chosen` and `rejected`: texts beside a `prompt`, or whole chats; a `margin` is used where present. The model
    gets a head of one score at the last token. hf/ is a sequence classifier, which transformers loads and `megarl train`
    takes as reward_model.path.

    Example: megarl rm recipes/quickstart_rm.yaml
    """
    from megarl.commands import run_supervised
    from megarl.recipe.supervised import RmRecipe

    run_supervised(RmRecipe, recipe, overrides or [], resume, go_on)


@app.command()
def dpo(recipe: RecipePath, overrides: Overrides = None, resume: Resume = False, go_on: GoOn = False) -> None:
    """Train a policy on pairs of a chosen and a rejected answer, without a reward model (DPO, IPO).

    Rows are those of `megarl rm`. The reference is the model as it was before the run.

    Example: megarl dpo recipes/quickstart_dpo.yaml
    """
    from megarl.commands import run_supervised
    from megarl.recipe.supervised import DpoRecipe

    run_supervised(DpoRecipe, recipe, overrides or [], resume, go_on)


@app.command(name="eval")
def evaluate(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Answer the held-out prompts with the server pool, grade the answers and print the table.

    Takes the same recipe as `megarl train`; another model is named by model.path=FOLDER.

    Example: megarl eval recipes/quickstart.yaml model.path=runs/quickstart/hf
    """
    from megarl.commands import run_eval

    run_eval(recipe, overrides or [])


@app.command()
def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    cluster: Annotated[Path | None, typer.Option(help="YAML file of the devices to plan for.")] = None,
    device: Annotated[str | None, typer.Option(help="In place of a file: a device of the table, such as H100.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="With --device: nodes.")] = 1,
    devices_per_node: Annotated[int | None, typer.Option(min=1, help="With --device: devices of a node.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the best placements to show.")] = 5,
    placement: Annotated[str, typer.Option(help="auto; or only colocate, hybrid, split or standalone.")] = "auto",
    lengths: Annotated[Path | None, typer.Option(help="Samples, a log or a column of numbers, for lengths.")] = None,
    response_mean: Annotated[float | None, typer.Option(help="Mean response, tokens.")] = None,
    response_spread: Annotated[float, typer.Option(min=0, help="Standard deviation over mean.")] = 0.9,
    prompt_mean: Annotated[float | None, typer.Option(help="Mean prompt, tokens.")] = None,
    rollout_quantization: Annotated[Literal["fp8"] | None, typer.Option(help="fp8: servers' weights in FP8.")] = None,
    from_run: Annotated[Path | None, typer.Option(help="Run whose measurements calibrate the rates.")] = None,
    simulate: Annotated[int, typer.Option(min=0, help="Also play so many steps: lengths drawn, devices failing.")] = 0,
    seed: Annotated[int, typer.Option(help="With --simulate: of what is drawn.")] = 1,
    explain: Annotated[bool, typer.Option("--explain", help="Show where seconds and bytes go, and what lost.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page there.")] = None,
) -> None:
    """Search where the roles of a recipe run best on some devices, without any of them.

    Predicts seconds and bytes of a step; needs of the model only its config.json.

    Example: megarl plan recipes/quickstart.yaml --device H100 --nodes 2 --explain
    """
    from megarl.placement.simulate import Conditions
    from megarl.plan_commands import PlanOptions, choose_cluster, run_plan

    options = PlanOptions(
        top=top,
        name=placement,
        lengths=lengths,
        response_mean=response_mean,
        response_spread=response_spread,
        prompt_mean=prompt_mean,
        quantization=rollout_quantization,
        explain=explain,
        from_run=from_run,
        simulate=simulate,
        conditions=Conditions(seed=seed),
        as_text=json,
        html=html,
    )
    run_plan(recipe, overrides or [], choose_cluster(cluster, device, nodes, devices_per_node, from_run), options)


@app.command()
def profile(
    out: Annotated[Path, typer.Option(help="Cluster file to write.")] = Path("cluster.yaml"),
    servers: Annotated[int, typer.Option(min=0, max=2, help="SGLang servers to time; 0 leaves generation out.")] = 2,
    timeout: Timeout = 600,
) -> None:
    """Measure this machine with small reference models, in about a minute, for `megarl plan --cluster`.

    Times matrix products, memory, collectives, passes and updates on 1, 2, 4... ranks, and answers of real servers.

    Example: megarl profile --out cluster.yaml
    """
    from megarl.profiling.command import run_profile

    run_profile(out, servers, timeout)


@app.command()
def doctor() -> None:
    """Say what this machine has, against the pinned versions, and what each missing part costs.

    Exits non-zero only where megarl cannot run.
    """
    from megarl.doctor import diagnose, render

    diagnosis = diagnose()
    Console().print(render(diagnosis))
    raise typer.Exit(0 if diagnosis.can_run else 1)


@recipe_app.command()
def show(
    recipe: RecipePath,
    overrides: Overrides = None,
    kind: Annotated[str, typer.Option(help="train, sft, rm or dpo; default: by the recipe's sections.")] = "",
) -> None:
    """Print the resolved recipe: base, overrides and defaults put together, and its batch arithmetic."""
    from megarl.commands import show_recipe

    show_recipe(recipe, overrides or [], kind)


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
    from megarl.convert.commands import run_convert
    from megarl.convert.convert import Settings

    raise typer.Exit(run_convert(operation, src, dst, layout, dtype, Settings(*settings), as_json=as_json))


@convert_app.command(name="hf-to-mcore")
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
    """Write a Megatron checkpoint (weights only) of an HF folder.

    Example: megarl convert hf-to-mcore models/qwen ckpt/qwen --tp 2 --verify
    """
    layout = _axes(tp, pp, cp, ep, etp, vpp, sequence_parallel, first_stage_layers, last_stage_layers)
    _convert("hf-to-mcore", src, dst, layout, dtype, (verify, force, timeout), as_json)


@convert_app.command(name="mcore-to-hf")
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


@convert_app.command(name="reshard")
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


@convert_app.command(name="inspect")
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


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends a run as Ctrl-C does: everything is torn down in order, which a second one must not interrupt."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    """Entry point: one paragraph for a user's mistake (exit code 2), no stack trace for an expected error (exit code 1)."""
    signal.signal(signal.SIGTERM, _terminate)
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        app(standalone_mode=True)
    except MegarlError as error:
        errors.print(f"megarl: {error}", markup=False)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        errors.print("megarl: interrupted; everything of this run has been ended", markup=False)
        sys.exit(130)
