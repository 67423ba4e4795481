"""Proves a weight sync: log-probs of a few sequences, from each server, against the trainer's own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.core.errors import MegarlError, SyncError
from megarl.core.types import Block, FloatArray, ShardPlan
from megarl.data.blocks import memory_of
from megarl.serving.client import ServerClient, ServerEndpoint
from megarl.serving.images import SentImages

Probe = Sequence[Sequence[int]]


@dataclass(frozen=True)
class ProbeAnswers:
    """logprobs: by server, one array a sequence. failed: servers that gave none, and why."""

    logprobs: dict[str, list[FloatArray]]
    failed: dict[str, str]


def probe_shard(probe: Probe, images: SentImages | None = None) -> tuple[ShardPlan, Block]:
    """The probe as a shard of one micro-batch, for the trainer's log-prob pass. Sequences of at least two tokens.

    images: those of the last sequence.
    """
    rows = [np.asarray(sequence, dtype=np.int32) for sequence in probe]
    memories = tuple(memory_of((row,), 0, np.ones(len(row) - 1, np.uint8)) for row in rows)
    number = np.arange(len(rows), dtype=np.int64)
    shown = None if images is None else (*((),) * (len(rows) - 1), images.pngs)
    block = Block(memories, weights=np.zeros(len(rows), np.float32), sample_index=number, images=shown)
    return ShardPlan(((len(rows),),), np.zeros(len(rows), np.int64), number), block


def split_column(column: FloatArray, probe: Probe, images: SentImages | None = None) -> list[FloatArray]:
    """The trainer's column for `probe_shard(probe, images)`, [T], as one array [L - 1] a sequence.

    Of one with images it is shorter: what is said in the places of their tokens is left out.
    """
    ends = np.cumsum([len(sequence) for sequence in probe])
    found = [column[end - len(sequence) : end - 1] for end, sequence in zip(ends, probe, strict=True)]
    return _of_text(found, probe, images)


def _of_text(logprobs: list[FloatArray], probe: Probe, images: SentImages | None) -> list[FloatArray]:
    """Without those of images' tokens, of which a server says nothing."""
    if images is None:
        return logprobs
    return [*logprobs[:-1], logprobs[-1][np.asarray(probe[-1][1:]) != images.token]]


async def probe_servers(
    servers: Sequence[ServerEndpoint], probe: Probe, deadline_s: float, images: SentImages | None = None
) -> ProbeAnswers:
    """Every server's log-probs of the probe, at temperature 1, as `split_column` has them."""
    shown = [None] * len(probe) if images is None else [*[None] * (len(probe) - 1), images]

    async def one(server: ServerEndpoint) -> list[FloatArray] | str:
        try:
            async with ServerClient(server) as client:
                asked = zip(probe, shown, strict=True)
                answers = await asyncio.gather(
                    *(client.prompt_scores(row, deadline_s, images=seen) for row, seen in asked)
                )
                return _of_text([answer.logprobs for answer in answers], probe, images)
        except MegarlError as error:
            return str(error)

    answers = dict(zip([s.name for s in servers], await asyncio.gather(*(one(s) for s in servers)), strict=True))
    return ProbeAnswers(
        {name: answer for name, answer in answers.items() if not isinstance(answer, str)},
        {name: answer for name, answer in answers.items() if isinstance(answer, str)},
    )


def verify(
    trainer: Sequence[FloatArray], servers: Mapping[str, Sequence[FloatArray]], tolerance: float, weight_version: int
) -> float:
    """The largest |server's log-prob - trainer's| over all servers and tokens, in nats.

    trainer: one array a sequence, at temperature 1; servers: the same, by name. Raises SyncError, with every
    server's figure, where one is over `tolerance` or not a number.
    """
    largest = {name: _largest_difference(trainer, answer) for name, answer in servers.items()}
    if not largest:
        raise SyncError(f"Weight version {weight_version} cannot be verified: no server answered the probe.")
    # Written so that nan counts as wrong.
    wrong = [name for name, value in largest.items() if not value <= tolerance]
    if wrong:
        figures = ", ".join(f"{name} {value:.3g}" for name, value in largest.items())
        raise SyncError(
            f"Weight version {weight_version} did not arrive as it was sent on {', '.join(wrong)}: the largest "
            f"log-prob difference to the trainer over {sum(len(row) for row in trainer)} probe tokens is {figures} "
            f"nats, allowed is {tolerance:g} (sync.tolerance)."
        )
    return max(largest.values())


def _largest_difference(ours: Sequence[FloatArray], theirs: Sequence[FloatArray]) -> float:
    """Over all sequences; nan where any is, which Python's own max would lose behind a number, and of other lengths."""
    pairs = list(zip(ours, theirs, strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return float("nan")
    return float(np.max([np.max(np.abs(a.astype(np.float64) - b.astype(np.float64))) for a, b in pairs]))
