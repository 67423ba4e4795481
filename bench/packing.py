"""Tokens a second of a training step with packed sequences, against the same sequences padded.

    python -m bench.packing

Lengths are log-normal (sigma 1). Both sides train the same samples, in the same micro-batches, from the same weights, on two
copies of one engine; on the padded side every sequence is padded to the longest of its micro-batch. Updates alternate. The
padding removed is padded tokens over real ones; the speed-up is the median over pairs of neighbouring updates, and includes
the optimizer's step, which padding does not make longer. Losses and gradient norms of both sides are compared in each step.
Exit code 0 only where they agree and the speed-up is at least 0.9 of the padding removed.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.support.measure import alternate, in_fresh_process, ratios, summary, write
from bench.support.training import QUICK, Size, micro_batches, one_rank, role, to_shard, write_model
from tests.training.samples import Example

TARGET = 0.9
BOUND = 1e-4  # relative, of losses and gradient norms


def padded(example: Example, length: int) -> Example:
    """The sequence with tokens behind its end that nothing is learned from."""
    missing = length - len(example.tokens)

    def pad(array: np.ndarray, value: int = 0) -> np.ndarray:
        return np.concatenate([array, np.full((missing, *array.shape[1:]), value, array.dtype)])

    return Example(
        tokens=pad(example.tokens, 1),
        labels=pad(example.labels),
        mask=pad(example.mask),
        rollout_logprobs=pad(example.rollout_logprobs),
        columns={name: pad(column) for name, column in example.columns.items()},
    )


def measure(size: Size, repeats: int) -> dict[str, Any]:
    """Time both sides in this process."""
    packed = micro_batches(size)
    longest = [max(len(example.tokens) for example in micro) for micro in packed]
    wide = [[padded(each, length) for each in micro] for micro, length in zip(packed, longest, strict=True)]
    sides = {"packed": to_shard(packed), "padded": to_shard(wide)}
    metrics: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="megarl-") as folder, one_rank() as rank:
        write_model(Path(folder), size)

        def update(side: str) -> None:
            metrics[side].append(rank.update(side, *sides[side]))

        for side in sides:
            rank.build(side, role(Path(folder)))
        seconds = alternate({side: partial(update, side) for side in sides}, repeats)
    tokens = {side: shard.num_tokens for side, (shard, _) in sides.items()}
    differences = [
        abs(one[name] - other[name]) / abs(other[name])
        for one, other in zip(metrics["packed"], metrics["padded"], strict=True)
        for name in ("actor/grad_norm", "actor/approx_kl", "actor/entropy")
    ]
    removed, speed_up = tokens["padded"] / tokens["packed"], summary(ratios(seconds, "padded", "packed"))
    return {
        "size": asdict(size),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": {side: tokens["packed"] / summary(each)["median"] for side, each in seconds.items()},
        "padding_removed": removed,
        "speed_up": speed_up,
        "share": speed_up["median"] / removed,
        "largest_difference": max(differences),
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    table = Table(title="A training step, sequences packed and padded")
    for column in ("side", "tokens in the step", "real tokens/s", "seconds", "lowest", "highest"):
        table.add_column(column, justify="right")
    for side, seconds in result["seconds"].items():
        cells = (f"{value:.3f}" for value in summary(seconds).values())
        table.add_row(side, f"{result['tokens'][side]:,}", f"{result['tokens_per_s'][side]:,.0f}", *cells)
    console = Console()
    console.print(table)
    speed_up = result["speed_up"]
    console.print(
        f"Speed-up x{speed_up['median']:.2f} ({speed_up['lowest']:.2f} to {speed_up['highest']:.2f}), padding removed "
        f"x{result['padding_removed']:.2f}: {result['share']:.2f} of it (target {TARGET}). Largest relative difference of "
        f"outputs {result['largest_difference']:.0e}.",
        highlight=False,
    )


def main(
    *,
    repeats: Annotated[int, typer.Option(min=1, help="Counted updates of each side.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the process.")] = 1,
    quick: Annotated[bool, typer.Option(help="A tiny model and one update: does it run at all?")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the result; bench/results where not given.")] = None,
) -> None:
    """Measure what packing gains over padding."""
    result = in_fresh_process(threads, measure, QUICK if quick else Size(), 1 if quick else repeats)
    show(result)
    write("packing", result, out)
    reached = quick or result["share"] >= TARGET
    if not reached or result["largest_difference"] > BOUND:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
