"""`megarl report`: a run, or several beside each other, as a table, a picture and a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Folders = Annotated[list[Path], typer.Argument(help="A run's folder, or several to compare.", show_default=False)]
Out = Annotated[
    Path | None,
    typer.Option(help="File of the page; default: page.html in the first run's folder.", show_default=False),
]


def report(folders: Folders, out: Out = None) -> None:
    """Show a run that is over, or goes on, from what lies in its folder.

    Prints the table that ends a run and draws curve.png anew (one run), and writes a page for the browser: charts of every
    metric, runs over each other in them, samples to read, and what the recipes differ in. The page is one file and needs no
    network.

    Example: megarl report runs/first runs/second --out compared.html
    """
    from megarl.core.errors import UserError
    from megarl.report.page import PAGE_FILE
    from megarl.report.show import show_runs

    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder: name a file, such as {out / PAGE_FILE}.")
    show_runs(folders, out or folders[0] / PAGE_FILE)
