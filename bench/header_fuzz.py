"""Headers of safetensors files, broken at random: is each read as the safetensors library reads it, or refused?

    python -m bench.header_fuzz

100,000 files of up to four tensors with up to four mutations each (tests/support/header_fuzz.py): dtypes, shapes, offsets,
names, metadata, repeated keys, changed bytes, lengths and data cut or grown. Where the library refuses, megarl must; where
it reads, megarl must read the same names, shapes, dtypes and bytes, and its reader of weights the same values. Anything but
a UserError of one paragraph counts as a traceback. Exit code 0 only where nothing was read otherwise, nothing was a
traceback, and nothing that the library reads was refused.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated

import safetensors
import typer
from rich.console import Console
from rich.table import Table

from bench.support.measure import write
from tests.support.header_fuzz import judge, mutated

MUTATIONS = 100_000


def main(
    mutations: Annotated[int, typer.Option(help="how many files")] = MUTATIONS,
    out: Annotated[Path | None, typer.Option(help="folder for the result")] = None,
) -> None:
    verdicts: Counter[str] = Counter()
    kinds: dict[str, Counter[str]] = {}
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(mutations):
            kind, content = mutated(random.Random(seed))
            try:
                verdict: str = judge(content, Path(folder) / "model.safetensors")
            except AssertionError as error:
                verdict = "read otherwise"
                console.print(f"seed {seed} ({kind}): {error}", highlight=False)
            except Exception as error:
                verdict = "traceback"
                console.print(f"seed {seed} ({kind}): {type(error).__name__}: {error}", highlight=False)
            verdicts[verdict] += 1
            kinds.setdefault(kind, Counter())[verdict] += 1
    columns = ("read alike", "refused by both", "refused by megarl alone", "read otherwise", "traceback")
    table = Table("last mutation", *columns, title=f"{mutations:,} files")
    for kind in sorted(kinds):
        table.add_row(kind, *(f"{kinds[kind][column]:,}" for column in columns))
    table.add_row("all", *(f"{verdicts[column]:,}" for column in columns))
    console.print(table)
    by_kind = {kind: dict(kinds[kind]) for kind in sorted(kinds)}
    found = {"files": mutations, "safetensors": safetensors.__version__, **{each: verdicts[each] for each in columns}}
    write("header_fuzz", {**found, "by_last_mutation": by_kind}, out)
    sys.exit(any(verdicts[column] for column in columns[2:]))


if __name__ == "__main__":
    typer.run(main)
