"""What the journal costs: seconds of writing and of reading back, and bytes, a token. One command:

    python -m bench.journal

A step's groups finish in waves, and each wave waits until it is on the disk. The share of a step of your own is the seconds for a
million tokens times the millions that it has, over its seconds; collectors write at the same time, each its own groups. Then a
real run of some steps says what share of their seconds its journal took (`perf/journal_s`), its decisions included; what a
journal writes while others generate costs nobody a second, and is counted all the same. The limit is 1%.
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
from tests.end_to_end.harness import start
from tools.make_arithmetic import make_arithmetic
from tools.make_tiny_model import make_tiny_model

PROMPT_TOKENS, RESPONSE_TOKENS, CHARACTERS = 128, 2048, 4.2  # of a token, in English
SAMPLES, GROUPS, WAVES = 8, 64, 8
SETTING = (
    "run.name=journal",
    "train.steps=8",
    "train.save_every=100",
    "data.eval=null",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=8",
    "rollout.max_response_tokens=256",
    "actor.mini_batch_samples=64",
    "actor.micro_batch_tokens=2048",
)
LONGEST_S = 600.0


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


def in_a_run(folder: Path) -> dict[str, float]:
    """Seconds of the journal beside those of steps. Raises RuntimeError where the run fails."""
    make_tiny_model(folder / "model", hidden_size=64)
    make_arithmetic(folder / "data", num_train=64, num_eval=8, num_sft=64)
    driver = start(folder, *SETTING)
    try:
        code, _, error = driver.finish(LONGEST_S)
    finally:
        driver.end()
    if code:
        raise RuntimeError(f"The run ended with code {code}:\n{error}")
    rows = [row for row in driver.metrics() if row["step"] > 1]  # the first one has the start in it
    step_s, journal_s = (sum(row[f"perf/{name}"] for row in rows) for name in ("step_s", "journal_s"))
    return {
        "tokens_a_step": sum(row["perf/tokens_per_s"] * row["perf/step_s"] for row in rows) / len(rows),
        "step_s": step_s / len(rows),
        "journal_s": journal_s / len(rows),
        "share": journal_s / step_s,
    }


def main(
    *,
    quick: Annotated[bool, typer.Option(help="A few short groups: does it run at all?")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the result; bench/results where not given.")] = None,
) -> None:
    """Measure writing and reading."""
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(_measure(Path(folder), WAVES if quick else GROUPS, 16 if quick else RESPONSE_TOKENS))
    if not quick:
        with tempfile.TemporaryDirectory(prefix="bj-", dir="/tmp") as folder:  # Ray's sockets have long names
            result["in_a_run"] = in_a_run(Path(folder))
    Console().print(result)
    write("journal", result, out)


if __name__ == "__main__":
    typer.run(main)
