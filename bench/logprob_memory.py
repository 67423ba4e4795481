"""Memory of log-probs over a large vocabulary: megarl's against `log_softmax` of the whole logits in float32.

    python -m bench.logprob_memory

Every measurement has a process of its own. Peaks are beyond the logits, which both sides are given; the unit is one
float32 tensor [tokens, vocabulary]. The backward pass ends with the gradient of the logits, [tokens, vocabulary] in their
dtype: the engine writes it over the logits, the naive version beside them. Errors are against float64, on some of the rows:
of log-probs and entropies in nats, of gradients relative to the row's largest. Exit code 0 only where megarl's are within
bounds and its peak is lower everywhere.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.support.measure import in_fresh_process, peak, write
from megarl.core.platform import get_platform, return_free_memory

TEMPERATURE = 0.8
ENTROPY_COEF = 0.1
CHECKED_ROWS = 32
# Of values, and of gradients, which come in the dtype of the logits.
BOUNDS = {"float32": (1e-5, 1e-5), "bfloat16": (1e-5, 1e-2)}
CASES = ((False, "none"), (False, "told"), (True, "none"), (True, "told"), (True, "trained"))


@dataclass(frozen=True)
class Case:
    """One measurement. entropy: none, told (no gradient), or trained."""

    side: str
    dtype: str
    backward: bool
    entropy: str
    tokens: int
    vocab: int


def naive(logits: Tensor, labels: Tensor, entropy: str) -> tuple[Tensor, Tensor | None]:
    """As it is written down in a paper; in float32, unless the logits are more precise."""
    logp = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / TEMPERATURE, dim=-1)
    chosen = logp.gather(1, labels[:, None])[:, 0]
    if entropy == "none":
        return chosen, None
    with torch.set_grad_enabled(entropy == "trained" and torch.is_grad_enabled()):
        return chosen, -(logp.exp() * logp).sum(-1)


def ours(logits: Tensor, labels: Tensor, entropy: str) -> tuple[Tensor, Tensor | None]:
    """As the engine computes them."""
    from megarl.training.logprob import vocab_parallel_logprobs

    scores = vocab_parallel_logprobs(
        logits,
        labels,
        vocab_size=logits.shape[1],
        temperature=TEMPERATURE,
        with_entropy=entropy != "none",
        entropy_grad=entropy == "trained",
        overwrite_logits=True,
    )
    return scores.logprobs, scores.entropy


SIDES = {"megarl": ours, "naive": naive}


def run(case: Case, side: str, logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
    """Forward and, where asked for, backward: leaves the gradient in `logits.grad`."""
    with torch.set_grad_enabled(case.backward):
        logprobs, entropy = SIDES[side](logits, labels, case.entropy)
        if case.backward:
            loss = (weights * logprobs).sum()
            if entropy is not None and case.entropy == "trained":
                loss = loss - ENTROPY_COEF * (weights * entropy).sum()
            loss.backward()
    return logprobs.detach(), None if entropy is None else entropy.detach()


def measure(case: Case) -> dict[str, Any]:
    """Peak, seconds and errors of one case in this process; a small one before: libraries keep what they once took."""
    if case.tokens > 8:
        measure(replace(case, tokens=8))
    device = get_platform().device
    random = torch.Generator(device).manual_seed(1)
    logits = torch.empty(case.tokens, case.vocab, dtype=getattr(torch, case.dtype), device=device)
    logits.normal_(std=3, generator=random)
    labels = torch.randint(case.vocab, (case.tokens,), generator=random, device=device)
    weights = torch.rand(case.tokens, generator=random, device=device)
    logits.requires_grad_(case.backward)
    rows = torch.linspace(0, case.tokens - 1, min(CHECKED_ROWS, case.tokens), device=device).long()
    chosen = logits.detach()[rows]
    return_free_memory(get_platform())  # so that it is counted again when it is taken again
    began = time.perf_counter()
    with peak() as held:
        logprobs, entropy = run(case, case.side, logits, labels, weights)
    seconds = time.perf_counter() - began
    exact = chosen.double().requires_grad_(case.backward)
    wanted = run(case, "naive", exact, labels[rows], weights[rows].double())
    errors = {"logprobs": (logprobs[rows] - wanted[0]).abs().max().item()}
    if entropy is not None and wanted[1] is not None:
        errors["entropy"] = (entropy[rows] - wanted[1]).abs().max().item()
    if logits.grad is not None and exact.grad is not None:
        distance = (logits.grad[rows] - exact.grad).abs().amax(1) / exact.grad.abs().amax(1)
        errors["gradient"] = distance.max().item()
    return {"peak_bytes": held.bytes, "seconds": seconds, "errors": errors}


def compare(dtype: str, backward: bool, entropy: str, tokens: int, vocab: int) -> dict[str, Any]:
    """Both sides of one case."""
    sides = {side: in_fresh_process(1, measure, Case(side, dtype, backward, entropy, tokens, vocab)) for side in SIDES}
    ratio = sides["megarl"]["peak_bytes"] / sides["naive"]["peak_bytes"]
    case = {"dtype": dtype, "backward": backward, "entropy": entropy, "tokens": tokens, "vocab": vocab}
    return {**case, **sides, "peak_ratio": ratio}


def is_good(row: dict[str, Any]) -> bool:
    """Whether megarl's numbers are right, and its peak is the lower one."""
    value_bound, gradient_bound = BOUNDS[row["dtype"]]
    errors = row["megarl"]["errors"].items()
    within = all(error < (gradient_bound if name == "gradient" else value_bound) for name, error in errors)
    return within and row["peak_ratio"] < 1


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    first = rows[0]
    table = Table(title=f"Peak beyond the logits, {first['tokens']:,} tokens, vocabulary of {first['vocab']:,}")
    for column in ("logits", "pass", "entropy", "megarl", "naive", "ratio", "seconds", "errors", "naive's errors"):
        table.add_column(column, justify="right")
    unit = 4 * first["tokens"] * first["vocab"]
    for row in rows:
        sides = [row[side] for side in SIDES]
        table.add_row(
            *(row["dtype"], "forward, backward" if row["backward"] else "forward", row["entropy"]),
            *(f"{side['peak_bytes'] / 2**20:,.0f} MiB = {side['peak_bytes'] / unit:.2f}" for side in sides),
            *(f"{row['peak_ratio']:.3f}", " / ".join(f"{side['seconds']:.2f}" for side in sides)),
            *(" ".join(f"{error:.0e}" for error in side["errors"].values()) for side in sides),
        )
    Console(width=160).print(table)


def main(
    *,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch.")] = 4096,
    vocab: Annotated[int, typer.Option(min=2, help="Vocabulary.")] = 151936,
    quick: Annotated[bool, typer.Option(help="Few tokens and one case: does it run at all?")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the result; bench/results where not given.")] = None,
) -> None:
    """Measure the peak memory of log-probs and entropy, forward and backward."""
    tokens, vocab = (1024, 60000) if quick else (tokens, vocab)
    rows = [
        compare(dtype, backward, entropy, tokens, vocab)
        for dtype in (("bfloat16",) if quick else BOUNDS)
        for backward, entropy in (CASES[-1:] if quick else CASES)
    ]
    show(rows)
    write("logprob_memory", {"rows": rows}, out)
    if not all(is_good(row) for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
