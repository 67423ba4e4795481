"""Memory of the real engine over layouts, measured and as the planner predicts it.

    python -m bench.memory_predicted

Processes of one rank each train or score a model of about a million parameters. Measured are the bytes of all live tensors, which
every operation of torch is watched for (tests/support/live_bytes.py): exact, and the same in every run. Of each layout the rank
with the highest peak is compared. Writes bench/results/memory_predicted.json and the table into docs/placement.md.
Exit code 0 only where the median error is below 5%, the worst below 10%.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.support.measure import in_fresh_ranks, write
from megarl.core.layout import Layout
from megarl.core.platform import get_platform
from megarl.core.ports import free_port
from megarl.recipe.roles import Lora
from tests.placement.memory_cases import Case, Measured, config_of, measure, predict

PAGE = Path(__file__).parent.parent / "docs" / "placement.md"
BEGIN, END = "<!-- bench.memory_predicted -->", "<!-- end of bench.memory_predicted -->"
MEDIAN, WORST = 0.05, 0.10
SP = {"sequence_parallel": True}


def _at(ranks: int, **sizes: Any) -> Layout:
    return Layout(world_size=ranks, **sizes)


ATTENTION = Lora(rank=8)
MLP = Lora(rank=16, targets=("linear_proj", "linear_fc1", "linear_fc2"))
CASES = (
    # One rank.
    Case("dense"),
    Case("dense", dtype="bfloat16"),
    Case("dense", tokens=64),
    Case("dense, many words"),
    Case("dense, many words", dtype="bfloat16"),
    Case("dense, many words", use="score"),
    Case("dense", recompute="selective"),
    Case("dense", recompute="full", dtype="bfloat16"),
    Case("dense, qk norm", dtype="bfloat16", tokens=1024),
    Case("dense, qk norm", lora=ATTENTION),
    Case("dense, qk norm", lora=MLP, dtype="bfloat16", recompute="full"),
    Case("dense", head=False),
    Case("dense", head=False, use="score", dtype="bfloat16"),
    Case("tied"),
    Case("tied", tokens=32),
    Case("tied", dtype="bfloat16", recompute="full"),
    Case("experts"),
    Case("experts", dtype="bfloat16", recompute="full"),
    Case("experts", use="score"),
    Case("experts", lora=ATTENTION, dtype="bfloat16"),
    Case("latent"),
    Case("latent", dtype="bfloat16", recompute="selective"),
    Case("latent", recompute="full"),
    Case("latent", use="score", dtype="bfloat16"),
    Case("local"),
    Case("local", dtype="bfloat16", recompute="full"),
    Case("layered heads"),
    Case("layered heads", dtype="bfloat16", recompute="full"),
    Case("layered heads, experts"),
    Case("layered heads, experts", dtype="bfloat16"),
    Case("norms behind", dtype="bfloat16"),
    Case("whole norms, experts", dtype="bfloat16"),
    Case("linear attention"),
    Case("linear attention", dtype="bfloat16", recompute="full"),
    Case("linear attention, experts", dtype="bfloat16"),
    # Two ranks.
    Case("dense", _at(2)),
    Case("dense", _at(2, tp=2)),
    Case("dense", _at(2, tp=2, **SP), dtype="bfloat16"),
    Case("dense", _at(2, tp=2, **SP), recompute="full"),
    Case("dense, many words", _at(2, tp=2, **SP), use="score"),
    Case("dense, qk norm", _at(2, tp=2, **SP), lora=ATTENTION),
    Case("dense", _at(2, pp=2)),
    Case("dense", _at(2, pp=2), dtype="bfloat16", recompute="full"),
    Case("dense", _at(2, pp=2, vpp=2)),
    Case("dense", _at(2, pp=2, first_stage_layers=3), dtype="bfloat16"),
    Case("tied", _at(2, pp=2)),
    Case("tied", _at(2, tp=2, **SP)),
    Case("dense", _at(2, cp=2)),
    Case("dense", _at(2, cp=2), dtype="bfloat16", recompute="full"),
    Case("dense", _at(2, cp=2), use="score"),
    Case("experts", _at(2, ep=2)),
    Case("experts", _at(2, tp=2, ep=2, **SP), dtype="bfloat16"),
    Case("latent", _at(2, tp=2, ep=2, **SP)),
    Case("latent", _at(2, pp=2), dtype="bfloat16"),
    Case("dense", _at(2, pp=2), head=False),
    Case("local", _at(2, tp=2, **SP), dtype="bfloat16"),
    Case("norms behind", _at(2, tp=2, **SP)),
    Case("layered heads", _at(2, tp=2, **SP)),
    Case("layered heads, experts", _at(2, tp=2, ep=2, **SP)),
    Case("whole norms, experts", _at(2, tp=2, ep=2, **SP)),
    Case("bias behind attention", _at(2, tp=2, **SP)),
    Case("whole norms, partly rotated", _at(2, tp=2, ep=2, **SP)),
    Case("learned activation", _at(2, tp=2, **SP)),
    Case("biased softmax", _at(2, tp=2, ep=2, **SP)),
    Case("norms behind rotation", _at(2, tp=2, **SP)),
    Case("linear attention", _at(2, tp=2, **SP), dtype="bfloat16"),
    Case("linear attention, experts", _at(2, tp=2, ep=2, **SP)),
    # Four ranks.
    Case("dense", _at(4, tp=2, pp=2, **SP)),
    Case("dense", _at(4, tp=2, cp=2, **SP), dtype="bfloat16"),
    Case("dense", _at(4, pp=4), dtype="bfloat16"),
    Case("dense", _at(4, tp=4, **SP)),
    Case("dense", _at(4, pp=2, cp=2), recompute="full"),
    Case("experts", _at(4, ep=4), tokens=1024),
    Case("experts", _at(4, pp=2, ep=2)),
    Case("latent", _at(4, tp=2, pp=2, ep=2, **SP), dtype="bfloat16"),
    Case("dense, qk norm", _at(4, tp=2, pp=2, **SP), lora=MLP),
    Case("experts", _at(4, tp=2, ep=4, **SP), use="score"),
)


def measure_all(rank: int, world_size: int, port: int, root: Path, cases: tuple[Case, ...]) -> list[Measured]:
    """What one rank of a world holds in each case."""
    from megarl.training.rank import Rank

    mine = Rank(rank, world_size, get_platform().name, seed=1)
    mine.rendezvous("127.0.0.1", port, timeout_s=300)
    try:
        return [measure(mine, case, root) for case in cases]
    finally:
        mine.close()


def compare(case: Case, ranks: list[Measured], root: Path) -> dict[str, Any]:
    """The rank with the highest peak beside the prediction. Errors are shares of what was measured."""
    fullest, held = max(ranks, key=lambda rank: rank.peak), predict(case, root)
    state, peak = float(held.state[0]), float(held.state[0] + held.working[0])
    return {
        "model": case.model,
        "layout": case.label,
        "ranks": case.layout.world_size,
        "measured": {**asdict(fullest), "state": fullest.state},
        "predicted": {**{name: float(value[0]) for name, value in vars(held).items()}, "state": state, "peak": peak},
        "state_error": state / fullest.state - 1,
        "peak_error": peak / fullest.peak - 1,
        "working_error": (peak - state) / (fullest.peak - fullest.state) - 1,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """As the page has it."""
    lines = [
        "| model | layout | state, MB | error | peak, MB | error | beyond the state |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        measured = row["measured"]
        lines.append(
            f"| {row['model']} | {row['layout']} | {measured['state'] / 1e6:.2f} | {row['state_error']:+.1%} "
            f"| {measured['peak'] / 1e6:.2f} | {row['peak_error']:+.1%} | {row['working_error']:+.1%} |"
        )
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of the errors of all rows."""
    peaks, working = ([abs(row[name]) for row in rows] for name in ("peak_error", "working_error"))
    return {
        "layouts": len(rows),
        "median": statistics.median(peaks),
        "worst": max(peaks),
        "highest": max(row["peak_error"] for row in rows),
        "working_median": statistics.median(working),
        "working_worst": max(working),
    }


def write_page(rows: list[dict[str, Any]], found: dict[str, float]) -> None:
    """Put the table where it belongs."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    text = (
        f"{found['layouts']:.0f} layouts; error of the peak: median {found['median']:.1%}, worst {found['worst']:.1%}; of what "
        f"is beyond the state: median {found['working_median']:.1%}, worst {found['working_worst']:.1%}."
    )
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n\n{table(rows)}\n{END}{rest.partition(END)[2]}")


def main(
    *,
    quick: Annotated[bool, typer.Option(help="Few layouts, and nothing written into the page.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the result; bench/results where not given.")] = None,
) -> None:
    """Compare predicted memory with the engine's over layouts."""
    two = next(case for case in CASES if case.layout.world_size == 2)
    chosen = [replace(case, tokens=128) for case in (CASES[0], two)] if quick else list(CASES)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for case in chosen:
            config_of(case, root)  # writes it, before ranks do it at once
        for size in sorted({case.layout.world_size for case in chosen}):
            mine = tuple(case for case in chosen if case.layout.world_size == size)
            ranks = in_fresh_ranks(size, measure_all, size, free_port(), root, mine)
            rows += [compare(case, list(each), root) for case, each in zip(mine, zip(*ranks, strict=True), strict=True)]
    print(table(rows))
    found = summary(rows)
    print(found)
    write("memory_predicted", {"summary": found, "rows": rows}, out)
    if not quick:
        write_page(rows, found)
    if found["median"] > MEDIAN or found["worst"] > WORST:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
