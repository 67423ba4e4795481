"""What the journal costs: seconds of writing and of reading back, and bytes, a token. One command:

    python -m bench.journal

A step's groups finish in waves, and each wave waits until it is on the disk. The share of a step of your own is the seconds for a
million tokens times the millions that it has, over its seconds; collectors write at the same time, each its own groups.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from bench.support.measure import write
from megarl.core.types import Prompt, Sample, Status, VersionSpan
from megarl.data.blocks import laid
from megarl.rollout.journal import Journal, Written
from megarl.rollout.tasks import GroupTask

PROMPT_TOKENS, RESPONSE_TOKENS, CHARACTERS = 128, 2048, 4.2  # of a token, in English
SAMPLES, GROUPS, WAVES = 8, 64, 8


def made(row: int, response_tokens: int) -> tuple[GroupTask, Prompt, Written]:
    """A finished group."""
    rng = np.random.default_rng(row)
    prompt = Prompt(f"p{row}", rng.integers(0, 150_000, PROMPT_TOKENS, np.int32), "a question", "42")
    text = "".join(chr(97 + each) for each in rng.integers(0, 26, int(CHARACTERS * response_tokens)))
    samples = [
        laid(
            Sample(
                id=f"1/p{row}/{index}",
                group_id=f"1/p{row}",
                prompt=prompt,
                response_ids=rng.integers(0, 150_000, response_tokens, np.int32),
                response_text=text,
                loss_mask=np.ones(response_tokens, np.uint8),
                rollout_logprobs=-rng.random(response_tokens).astype(np.float32),
                versions=(VersionSpan(1, 0, response_tokens),),
                status=Status.COMPLETED,
                reward=1.0,
                reward_parts={"exact": 1.0},
            )
        )
        for index in range(SAMPLES)
    ]
    return GroupTask(row, row, 1, 0, SAMPLES, recorded=True), prompt, Written(samples, [])


async def _measure(folder: Path, groups: int, response_tokens: int) -> dict[str, Any]:
    step = [made(row, response_tokens) for row in range(groups)]
    tokens = groups * SAMPLES * (PROMPT_TOKENS + response_tokens)
    journal = Journal(folder)
    began, cpu = time.perf_counter(), time.process_time()
    for wave in range(WAVES):
        await asyncio.gather(*(journal.add(*each) for each in step[wave::WAVES]))
    write_s, write_cpu_s = time.perf_counter() - began, time.process_time() - cpu
    await journal.close()
    journal, began = Journal(folder), time.perf_counter()
    for task, prompt, group in step:
        found = await journal.find(task, prompt)
        assert found is not None
        assert all(
            np.array_equal(a.response_ids, b.response_ids) for a, b in zip(found.samples, group.samples, strict=True)
        )
    read_s = time.perf_counter() - began
    await journal.close()
    return {
        "groups": groups,
        "tokens": tokens,
        "write_s_per_million": write_s / tokens * 1e6,
        "write_cpu_s_per_million": write_cpu_s / tokens * 1e6,
        "read_s_per_million": read_s / tokens * 1e6,
        "bytes_per_token": sum(path.stat().st_size for path in folder.iterdir()) / tokens,
    }


def main(
    *,
    quick: Annotated[bool, typer.Option(help="A few short groups: does it run at all?")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the result; bench/results where not given.")] = None,
) -> None:
    """Measure writing and reading."""
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(_measure(Path(folder), WAVES if quick else GROUPS, 16 if quick else RESPONSE_TOKENS))
    Console().print(result)
    write("journal", result, out)


if __name__ == "__main__":
    typer.run(main)
