"""megarl's advantages and losses beside verl's core_algos, on the same batch: numbers, and seconds on one thread.

    python -m bench.peers_algorithms

verl's pinned release goes into a folder of its own in .cache/, by pip and without the packages that its trainers need. Both sides
get the same samples: verl as tensors padded to the longest, megarl as sequences end to end. What differs on purpose is in
`DIFFERENCES`: what verl's numbers have to be multiplied by, or which cases the batch leaves out, and why; beyond these every
number has to be equal, gradients too. Writes bench/results/peers_algorithms.json. Exit code 0 only where all is equal.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from bench.support.measure import write
from bench.support.our_algorithms import (
    CLIP_HIGH,
    CLIP_LOW,
    DUAL_CLIP,
    GAMMA,
    LAM,
    MAX_RATIO,
    MEAN_RATIO,
    MIN_RATIO,
    QUICK,
    VALUE_CLIP,
    Batch,
    Size,
    make_batch,
    our_side,
)
from bench.support.quickstart import ROOT
from bench.support.seconds import fastest

PINS = (
    *("verl==0.9.1", "tensordict==0.15.3", "omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3"),
    *("hydra-core==1.3.8", "codetiming==1.4.0", "pyvers==0.2.3"),
)
TOLERANCE = 2e-5  # of the largest number: both compute in float32, and add in other orders
REPEATS = 5


def few(batch: Batch) -> float:
    """From a group's sample standard deviation to its population's."""
    size = np.bincount(batch.groups)[0]
    return float(np.sqrt(size / (size - 1)))


def all_tokens(batch: Batch) -> float:
    """The same over all trained tokens."""
    size = batch.mask.sum()
    return float(np.sqrt(size / (size - 1)))


def teaching(batch: Batch) -> float:
    """Samples whose reward is not 0, over those in groups whose rewards differ."""
    differ = [np.ptp(batch.rewards[batch.groups == group]) > 0 for group in batch.groups]
    return float(np.count_nonzero(batch.rewards) / max(1, sum(differ)))


@dataclass(frozen=True)
class Difference:
    """What differs on purpose. factor: what verl's numbers are multiplied by to be ours; None where cases are left out."""

    of: tuple[str, ...]
    what: str
    why: str
    factor: Callable[[Batch], float] | None = None


DIFFERENCES = (
    Difference(
        ("GRPO", "GRPO, vectorized"),
        "the standard deviation of a group: verl divides by n - 1, megarl by n",
        "the rewards of a group are all that there is to compare with, and the paper (arXiv 2402.03300) says std; "
        "in a group of 8 the advantages differ by 7%, which the learning rate takes up",
        few,
    ),
    Difference(
        ("REINFORCE++", "REINFORCE++ baseline", "GAE"),
        "whitening: verl's variance divides by n - 1 and has 1e-8 under the root, megarl's by n, and 1e-8 beside the deviation",
        "the same of thousands of tokens; all-equal values become exactly 0",
        all_tokens,
    ),
    Difference(
        ("GPG",),
        "alpha: verl counts samples whose reward is not 0, megarl those in groups whose rewards differ",
        "the paper's (arXiv 2504.02546) is about samples that give no gradient; verl's hangs on where the scale has its zero",
        teaching,
    ),
    Difference(
        ("GRPO", "Dr.GRPO", "RLOO", "OPO", "REINFORCE++ baseline"),
        "a group of one: verl keeps the reward as the advantage (its vectorized RLOO: 0), megarl gives 0",
        "one sample has nothing to be compared with",
    ),
    Difference(
        ("GRPO", "GRPO, vectorized"),
        "a group of equal rewards: verl's mean in float32 may leave rounding, which eps of 1e-6 makes visible; megarl's is 0",
        "such a group teaches nothing",
    ),
    Difference(
        ("GSPO",),
        "the log of a sequence's ratio: verl bounds it from above by 10, megarl by 20 on both sides",
        "far outside of any clip range; all of megarl's ratios have one bound",
    ),
    Difference(
        ("KL k3", "KL k2", "KL abs"),
        "bounds: verl bounds k3 itself by 10 and leaves k2 and abs as they are, megarl bounds the difference by 20 in all three",
        "the gradient of an extreme token stays what the estimator says, and finite",
    ),
    Difference(
        ("TIS and rejection",),
        "the loss of what is left: verl divides by tokens of sequences that are not rejected, megarl by all trained tokens",
        "the weights here are the same; a rejected sequence is one that teaches nothing, and the others' step stays as large",
    ),
    Difference(
        ("PPO, constant",),
        "verl divides by the samples that have trained tokens and the longest of the batch unless told, megarl by all samples "
        "and the recipe's longest response",
        "a constant is one: it does not hang on the batch (arXiv 2503.20783)",
    ),
)


def factor(name: str, batch: Batch) -> float:
    """What verl's numbers have to be multiplied by."""
    found = [each.factor(batch) for each in DIFFERENCES if name in each.of and each.factor is not None]
    return found[0] if found else 1.0


def verl_folder() -> Path:
    """Where verl is, which is put there where it is not."""
    folder = ROOT / ".cache" / f"verl-{hashlib.sha256(' '.join(PINS).encode()).hexdigest()[:12]}"
    if not (folder / "made").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PINS]
        subprocess.run(command, check=True)
        (folder / "made").touch()
    return folder


def verl_side(batch: Batch, repeats: int) -> dict[str, np.ndarray]:
    """What verl's functions return, padded, with their seconds."""
    given = {name: batch.padded(column) for name, column in batch.columns.items()}
    given |= {"mask": batch.padded(batch.mask), "groups": batch.groups, "greedy": batch.greedy[batch.groups]}
    settings = {
        **{"gamma": GAMMA, "lam": LAM, "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH},
        **{"dual_clip": DUAL_CLIP, "value_clip": VALUE_CLIP},
        **{"min_ratio": MIN_RATIO, "max_ratio": MAX_RATIO, "mean_ratio": MEAN_RATIO},
    }
    given |= {name: np.array(value) for name, value in settings.items()}
    with tempfile.TemporaryDirectory() as folder:
        asked, found = Path(folder) / "batch.npz", Path(folder) / "found.npz"
        np.savez(asked, allow_pickle=False, **given)
        done = subprocess.run(
            [sys.executable, "-m", "bench.support.verl_algorithms", str(asked), str(found), str(repeats)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(verl_folder()), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"verl's side exited with {done.returncode}: {done.stderr[-3000:]}")
        return dict(np.load(found))


def compare(batch: Batch, theirs: dict[str, np.ndarray], repeats: int) -> list[dict[str, Any]]:
    """A row for each function: its largest difference, over the largest number, and seconds of both sides."""
    rows = []
    for name, call in our_side(batch).items():
        result, seconds = fastest(call, repeats)
        errors = []
        for number, part in enumerate(result if isinstance(result, tuple) else (result,)):
            other = theirs[f"{name}/{number}"] * factor(name, batch)
            other = batch.ragged(other) if other.ndim else other
            errors.append(float(np.abs(part - other).max() / max(np.abs(part).max(), 1e-12)))
        verl_s = float(theirs[f"{name}/seconds"])
        rows.append(
            {"name": name, "factor": factor(name, batch), "error": max(errors), "megarl_s": seconds, "verl_s": verl_s}
        )
    return rows


def main(
    *,
    quick: Annotated[bool, typer.Option(help="A small batch: proves that both sides run.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the result; bench/results where not given.")] = None,
) -> None:
    """Compare megarl's algorithms with verl's."""
    torch.set_num_threads(1)
    batch, repeats = make_batch(QUICK if quick else Size()), 1 if quick else REPEATS
    rows = compare(batch, verl_side(batch, repeats), repeats)
    table = Table("", "largest difference", "verl's times", "megarl, ms", "verl, ms", title=PINS[0])
    for row in rows:
        times = [f"{row[side] * 1e3:.2f}" for side in ("megarl_s", "verl_s")]
        table.add_row(row["name"], f"{row['error']:.1e}", f"{row['factor']:.4f}", *times)
    Console().print(table)
    differences = [{"of": each.of, "what": each.what, "why": each.why} for each in DIFFERENCES]
    size = {"samples": len(batch.rewards), "tokens": len(batch.mask), "trained": int(batch.mask.sum())}
    write("peers_algorithms", {"verl": PINS[0], "batch": size, "rows": rows, "differences": differences}, out)
    wrong = [row["name"] for row in rows if row["error"] > TOLERANCE]
    if wrong:
        sys.exit(f"Not equal: {', '.join(wrong)}")


if __name__ == "__main__":
    typer.run(main)
