"""What each of two processes does for test_layouts: `<rank> <port> <folder> <target>`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from megarl.core.layout import Layout
from megarl.training.logprob import vocab_parallel_logprobs, vocab_parallel_top
from megarl.training.rank import Rank
from tests.support.platforms import chosen
from tests.training.harness import OPTIMIZER, VOCAB, actor_spec, weights
from tests.training.samples import examples, shards

MINIS = [examples([9, 17, 30, 12], VOCAB, seed) for seed in range(3)]
LONG = examples([100, 7, 300, 2, 511, 64, 1024], VOCAB)

VOCAB_SIZES = (8, 7, 3)  # of 8 columns: no padding, some, and all that the second of two ranks holds


def train(rank: Rank, seeds: list[int]) -> list[dict[str, float]]:
    """One update on each of the mini-batches."""
    groups, metrics = rank.engine("actor").groups, []
    for seed in seeds:
        parts, columns = shards([MINIS[seed]], dp=groups.layout.dp, micro_batches=2)
        metrics.append(rank.update("actor", parts[groups.place.dp], columns[groups.place.dp]))
    return metrics


def sharded_logprobs(rank: Rank, vocab_size: int) -> dict[str, torch.Tensor]:
    """Scores of random logits [12, 8] of which this rank holds its columns, and the gradient for them."""
    random = torch.Generator().manual_seed(3)
    full, labels = torch.randn(12, 8, generator=random) * 4, torch.randint(vocab_size, (12,), generator=random)
    full, labels = full.to(rank.platform.device), labels.to(rank.platform.device)
    groups = rank.engine("actor").groups
    mine = full.chunk(groups.layout.tp, dim=1)[groups.place.tp].clone().requires_grad_()
    ids = vocab_parallel_top(mine.detach(), 2, vocab_size=vocab_size, group=groups.tp)
    scores = vocab_parallel_logprobs(
        mine,
        labels,
        vocab_size=vocab_size,
        temperature=0.7,
        group=groups.tp,
        with_entropy=True,
        entropy_grad=True,
        chunk_elements=20,
        top_ids=ids,
    )
    assert scores.entropy is not None and scores.top is not None
    of_top = (scores.top * torch.arange(1, 4, device=mine.device)).sum(dim=1)
    (scores.logprobs.square() + 3 * scores.entropy + of_top).sum().backward()
    assert mine.grad is not None
    found = {"logprobs": scores.logprobs.detach(), "entropy": scores.entropy.detach(), "grad": mine.grad}
    found |= {"ids": ids, "top": scores.top.detach()}
    return {name: tensor.cpu() for name, tensor in found.items()}


def run(rank: Rank, layout: Layout, folder: Path, checkpoint: Path, other: Path | None) -> dict[str, object]:
    """Score, take two steps, save, take a third; then take the third again from another layout's checkpoint.

    At last two steps of an optimizer that every data-parallel rank has whole.
    """
    rank.build("actor", actor_spec(folder, layout))
    parts, _ = shards([LONG], dp=layout.dp)
    result: dict[str, object] = {"logprobs": rank.logprobs("actor", parts[rank.engine("actor").groups.place.dp])}
    result["sharded"] = {size: sharded_logprobs(rank, size) for size in VOCAB_SIZES}
    metrics = train(rank, [0, 1])
    rank.save("actor", checkpoint)
    result["metrics"] = metrics + train(rank, [2])
    result["weights"] = weights(rank, "actor")
    if other is not None:
        rank.build("actor", actor_spec(folder, layout))
        rank.load("actor", other)
        result["resumed"] = train(rank, [2])
        result["resumed_weights"] = weights(rank, "actor")
    whole = OPTIMIZER.model_copy(update={"name": "sgd"})
    rank.build("actor", replace(actor_spec(folder, layout), optimizer=whole))
    result["whole"] = train(rank, [0, 1])
    return result


def main() -> None:
    """Go through both layouts with one process."""
    index, port, folder, target = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    results = {}
    rank = Rank(index, 2, chosen().name, seed=1)
    rank.rendezvous("127.0.0.1", port, timeout_s=60)
    for tp in (2, 1):
        name = f"tp{tp}"
        results[name] = run(rank, Layout(tp=tp, world_size=2), folder, target / name, target / "single")
    rank.close()
    torch.save(results, target / f"rank{index}.pt")
