"""`megarl recipe`: looks at recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from megarl.commands.options import Overrides, RecipePath
from megarl.core.errors import UserError

if TYPE_CHECKING:
    from megarl.recipe.load import Loaded

app = typer.Typer(help="Look at recipes.", no_args_is_help=True)


@app.command()
def show(
    recipe: RecipePath,
    overrides: Overrides = None,
    kind: Annotated[str, typer.Option(help="train, sft, rm or dpo; default: by the recipe's sections.")] = "",
    essential: Annotated[
        bool, typer.Option("--essential", help="Only the keys that a user sets, with meaning.")
    ] = False,
) -> None:
    """Print the resolved recipe: base, overrides and defaults put together, and its batch arithmetic.

    Example: megarl recipe show recipes/quickstart.yaml --essential
    """
    from rich.console import Console
    from rich.syntax import Syntax
    from rich.table import Table

    from megarl.recipe import reference
    from megarl.recipe.batch import plan_batches
    from megarl.recipe.load import KINDS, command_of, detect_kind, load_recipe
    from megarl.recipe.source import dump_yaml

    if kind and kind not in KINDS:
        raise UserError(f"--kind {kind}: there is no such command. Choose among {', '.join(KINDS)}.")
    chosen: Any = KINDS[kind] if kind else detect_kind(recipe, overrides or [])
    loaded: Loaded[Any] = load_recipe(recipe, overrides or [], chosen)
    console = Console()
    if essential:
        table = Table("key", "value", "is")
        for row in reference.essential(command_of(chosen), loaded.resolved):
            table.add_row(*row)
        console.print(table)
    else:
        console.print(Syntax(dump_yaml(loaded.resolved), "yaml", background_color="default"))
    console.print(plan_batches(loaded.recipe).describe(), highlight=False)
