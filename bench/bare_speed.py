"""A training step through the engine on one rank, against hand-written torch loops over the transformers model.

    python -m bench.bare_speed

The loops are what one writes without a framework: log_softmax, the loss, backward, clip, AdamW (torch's fused one), over
the same micro-batches of the same samples from the same weights. They differ in how a micro-batch meets the model: padded
(to the right, so that causal attention needs no mask), packed (by position ids, from which transformers makes a mask), or
sequence by sequence. Updates of all sides alternate in one process; the ratio is the fastest loop's seconds over the
engine's, the median over turns. Loss "sft" is cross entropy; "policy" is the clipped policy loss with the entropy as a
metric, which is what a step of RL computes. Gradient norms of all sides are compared in each step.
Exit code 0 only where they agree and every ratio is at least 1.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.support.measure import alternate, in_fresh_process, ratios, summary, write
from bench.support.training import (
    ALGORITHM,
    OPTIMIZER,
    QUICK,
    Size,
    micro_batches,
    one_rank,
    role,
    to_shard,
    write_model,
)
from megarl.training.spec import SftObjective
from tests.training.samples import Example

TARGET = 1.0
BOUND = 1e-4  # relative, of gradient norms


def padded(model: Any, micro: list[Example]) -> tuple[Tensor, np.ndarray]:
    """Logits of one batch [sequences, longest], and which of them are real."""
    tokens = torch.zeros(len(micro), max(len(each.tokens) for each in micro), dtype=torch.int64)
    for row, each in enumerate(micro):
        tokens[row, : len(each.tokens)] = torch.from_numpy(each.tokens)
    logits = model(input_ids=tokens, use_cache=False).logits
    real = np.arange(tokens.shape[1]) < np.array([len(each.tokens) for each in micro])[:, None]
    return logits.flatten(0, 1), real.ravel()


def packed(model: Any, micro: list[Example]) -> tuple[Tensor, np.ndarray]:
    """Logits of one row of sequences, told apart by their position ids."""
    tokens = torch.from_numpy(np.concatenate([each.tokens for each in micro]))
    positions = torch.cat([torch.arange(len(each.tokens)) for each in micro])
    logits = model(input_ids=tokens[None], position_ids=positions[None], use_cache=False).logits
    return logits[0], np.ones(len(tokens), bool)


FORMS: dict[str, Callable[[Any, list[Example]], tuple[Tensor, np.ndarray]]] = {
    "padded": padded,
    "packed": packed,
    "by sequence": packed,  # of one sequence
}


def sft_loss(logits: Tensor, column: Callable[[str], Tensor]) -> Tensor:
    """Sum of the labels' cross entropy."""
    return (F.cross_entropy(logits, column("labels"), reduction="none") * column("mask")).sum()


def policy_loss(logits: Tensor, column: Callable[[str], Tensor]) -> Tensor:
    """Sum of the clipped policy loss; the entropy is computed, as every training reports it."""
    logp = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        -(logp.exp() * logp).sum(-1)
    ratio = torch.exp(logp.gather(1, column("labels")[:, None])[:, 0] - column("old_logprobs"))
    clipped = ratio.clamp(1 - ALGORITHM.clip_low, 1 + ALGORITHM.clip_high)
    advantages = column("advantages")
    return (-torch.minimum(ratio * advantages, clipped * advantages) * column("mask")).sum()


class Loop:
    """A model, its optimizer, and one form of feeding it."""

    def __init__(self, folder: Path, form: str, loss: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).train()
        self._form, self._loss = form, sft_loss if loss == "sft" else policy_loss
        betas = (OPTIMIZER.beta1, OPTIMIZER.beta2)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=OPTIMIZER.lr, betas=betas, eps=OPTIMIZER.eps, weight_decay=0.0, fused=True
        )
        self.norms: list[float] = []

    def update(self, micros: list[list[Example]]) -> None:
        """One optimizer step."""
        if self._form == "by sequence":
            micros = [[example] for micro in micros for example in micro]
        denominator = sum(float(example.mask.sum()) for example in chain.from_iterable(micros))
        self._optimizer.zero_grad()
        for micro in micros:
            logits, real = FORMS[self._form](self._model, micro)
            (self._loss(logits, partial(_column, micro, real)) / denominator).backward()
        # As `clip_grad_norm_`, but for its norm: torch's own of millions of elements is 5e-5 too small on a CPU with AVX-512.
        parameters = list(self._model.parameters())
        norm = torch.stack([parameter.grad.square().sum() for parameter in parameters]).sum().sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, OPTIMIZER.clip_grad, norm)
        self.norms.append(float(norm))
        self._optimizer.step()


def _column(micro: list[Example], real: np.ndarray, name: str) -> Tensor:
    """A column of the micro-batch, zeros on padding."""
    parts = [getattr(each, name) if name in ("labels", "mask") else each.columns[name] for each in micro]
    values = np.concatenate(parts)
    spread = np.zeros(len(real), values.dtype)
    spread[real] = values
    return torch.from_numpy(spread)


def measure(size: Size, loss: str, repeats: int) -> dict[str, Any]:
    """Time all sides in this process."""
    micros = micro_batches(size)
    shard, columns = to_shard(micros)
    norms: list[float] = []
    with tempfile.TemporaryDirectory(prefix="megarl-") as name, one_rank() as rank:
        folder = write_model(Path(name), size)
        rank.build("actor", role(folder, SftObjective()) if loss == "sft" else role(folder))
        loops = {form: Loop(folder, form, loss) for form in FORMS}

        def update() -> None:
            metrics = rank.update("actor", shard, {} if loss == "sft" else columns)
            norms.append(metrics["actor/grad_norm"])

        sides: dict[str, Callable[[], object]] = {form: partial(loop.update, micros) for form, loop in loops.items()}
        seconds = alternate({"engine": update, **sides}, repeats)
    medians = {side: summary(each)["median"] for side, each in seconds.items()}
    best = min(FORMS, key=lambda form: medians[form])
    differences = [
        abs(one - other) / other for loop in loops.values() for one, other in zip(norms, loop.norms, strict=True)
    ]
    return {
        "loss": loss,
        "threads": torch.get_num_threads(),
        "tokens": shard.num_tokens,
        "size": asdict(size),
        "seconds": seconds,
        "tokens_per_s": {side: shard.num_tokens / median for side, median in medians.items()},
        "best_loop": best,
        "ratio": summary(ratios(seconds, best, "engine")),
        "largest_difference": max(differences),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    first = rows[0]
    sides = ["engine", *FORMS]
    table = Table(
        title=f"A training step of {first['tokens']:,} tokens: real tokens/s, median of {len(first['seconds']['engine'])}"
    )
    for column in ("loss", "threads", *sides, "engine / best loop", "lowest", "highest", "gradient norms"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            *(row["loss"], str(row["threads"])),
            *(f"{row['tokens_per_s'][side]:,.0f}" for side in sides),
            *(f"{value:.3f}" for value in row["ratio"].values()),
            f"{row['largest_difference']:.0e}",
        )
    Console(width=140).print(table)


def main(
    *,
    repeats: Annotated[int, typer.Option(min=1, help="Counted updates of each side.")] = 9,
    threads: Annotated[list[int] | None, typer.Option(help="Threads of a process; 1 and 2 where not given.")] = None,
    quick: Annotated[bool, typer.Option(help="A tiny model and one update: does it run at all?")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the result; bench/results where not given.")] = None,
) -> None:
    """Measure the engine against hand-written loops."""
    size, repeats, counts = (QUICK, 1, [1]) if quick else (Size(), repeats, threads or [1, 2])
    rows = [in_fresh_process(count, measure, size, loss, repeats) for loss in ("sft", "policy") for count in counts]
    show(rows)
    write("bare_speed", {"rows": rows}, out)
    agree = all(row["largest_difference"] < BOUND for row in rows)
    if not agree or not (quick or all(row["ratio"]["median"] >= TARGET for row in rows)):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
