"""`megarl recipe`: looks at recipes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megarl.commands.options import Overrides, RecipePath
from megarl.core.errors import UserError

if TYPE_CHECKING:
    from megarl.recipe.load import Loaded

app = typer.Typer(help="Look at recipes; the examples that come with megarl.", no_args_is_help=True)


@app.command(name="list")
def list_examples() -> None:
    """List the example recipes: what runs them, on how many devices, and what each is.

    Example: megarl recipe list
    """
    from megarl.recipe.examples import examples

    rows = [(each.name, f"megarl {each.command}", each.devices, each.about) for each in examples()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(map(str.ljust, row, widths)).rstrip())


@app.command()
def copy(
    name: Annotated[str, typer.Argument(help="As megarl recipe list says it.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to copy it into.")] = Path("recipes"),
) -> None:
    """Copy an example recipe, and the one that it builds on, to begin one of your own with.

    Example: megarl recipe copy quickstart
    """
    from megarl.recipe.examples import copy_example

    for path in copy_example(name, target):
        typer.echo(str(path))


@app.command()
def show(
    recipe: RecipePath,
    overrides: Overrides = None,
    kind: Annotated[str, typer.Option(help="train, sft, rm, dpo or kto; default: by the recipe's sections.")] = "",
    essential: Annotated[
        bool, typer.Option("--essential", help="Only the keys that a user sets, with meaning.")
    ] = False,
) -> None:
    """Print the resolved recipe: base, overrides and defaults put together, and its batch arithmetic.

    Example: megarl recipe show recipes/quickstart.yaml --essential
    """
    from rich.console import Console
    from rich.syntax import Syntax
    from rich.table import Column, Table

    from megarl.recipe import reference
    from megarl.recipe.algorithm_rules import learning_notes
    from megarl.recipe.batch import plan_batches
    from megarl.recipe.load import KINDS, command_of, detect_kind, load_recipe
    from megarl.recipe.sampling_rules import staleness_notes
    from megarl.recipe.schema import Recipe
    from megarl.recipe.source import dump_yaml

    if kind and kind not in KINDS:
        raise UserError(f"--kind {kind}: there is no such command. Choose among {', '.join(KINDS)}.")
    chosen: Any = KINDS[kind] if kind else detect_kind(recipe, overrides or [])
    loaded: Loaded[Any] = load_recipe(recipe, overrides or [], chosen)
    console = Console(markup=False)
    if essential:
        # Keys are whole: they are there to be copied. Long values go on in the next line.
        table = Table(Column("key", no_wrap=True), Column("value", overflow="fold"), Column("is", overflow="fold"))
        for row in reference.essential(command_of(chosen), loaded.resolved):
            table.add_row(*row)
        console.print(table)
    else:
        # Not the syntax itself, which cuts off what is longer than a line.
        colours = Syntax("", "yaml", background_color="default")
        console.print(colours.highlight(dump_yaml(loaded.resolved)), soft_wrap=True, end="")
    of = loaded.recipe
    notes = (*staleness_notes(of), *learning_notes(of)) if isinstance(of, Recipe) else ()
    mark = "" if essential else "# "  # what is printed is still a recipe
    for line in (plan_batches(loaded.recipe).describe(), *notes):
        console.print(f"{mark}{line}", highlight=False, markup=False, soft_wrap=True)
