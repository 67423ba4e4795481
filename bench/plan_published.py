"""How well the planner's models agree with measurements that others published. One command:

    python -m bench.plan_published            # predictions with the table's rates
    python -m bench.plan_published --fit      # also: what the calibration rows give, and each set of rows by itself

Rows are in bench/published/rows.csv: Megatron (some: FSDP) with vLLM on H100 and H20, from ISEEKYAN/verl_megatron_practice
(Apache-2.0). What a row calibrates is in `bench/support/published.py`; all else is held out. bench/published/nemo_rl.csv has
whole steps of GRPO on DGX H100, from NVIDIA-NeMo/RL v0.6 (docs/about/performance-summary.md, Apache-2.0). Nothing is fitted to
them.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.measure import write
from bench.support.published import (
    DENSE,
    EXPERTS,
    PHASES,
    QWEN_30B_A3B,
    SETS,
    Known,
    Point,
    Row,
    calibrated,
    fits,
    points,
    read_rows,
)
from megarl.placement.cluster import make_cluster
from megarl.placement.devices import GIB
from megarl.placement.lengths import ASSUMED_SPREAD, lognormal
from megarl.placement.partitions import Partition
from megarl.placement.plan import make_plan
from megarl.placement.rates import RATES, Rates
from megarl.placement.space import Space
from megarl.placement.workload import ACTOR, REFERENCE, ROLLOUT, Workload

FOLDER = Path(__file__).parent
NEMO_ROWS = FOLDER / "published" / "nemo_rl.csv"
NEMO_SAMPLES, NEMO_PROMPT = 32, 150.0


def rank_correlation(found: Sequence[Point]) -> float:
    """Spearman's; ties get the mean of their ranks."""
    ranks = [_ranks([getattr(point, name) for point in found]) for name in ("predicted", "measured")]
    # Where all are predicted alike there is no order.
    return float(np.corrcoef(ranks)[0, 1]) if min(len(set(each)) for each in ranks) > 1 else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    each = np.asarray(values)
    return [float((each < value).sum() + ((each == value).sum() - 1) / 2) for value in each]


def summary(found: Sequence[Point]) -> dict[str, float]:
    """Errors of some predictions."""
    off = [point.predicted / point.measured - 1 for point in found]
    line = {"values": len(found), "median_error": float(np.median(np.abs(off))), "bias": float(np.median(off))}
    return line | ({"rank_correlation": rank_correlation(found)} if len(found) > 2 else {})


def by_phase(found: Sequence[Point]) -> dict[str, dict[str, float]]:
    return {
        phase: summary([point for point in found if point.phase == phase])
        for phase in (*PHASES, "step_s")
        if any(point.phase == phase for point in found)
    }


def show(title: str, table: Mapping[str, Mapping[str, float]]) -> None:
    print(f"\n{title}\n| | values | median error | bias | rank correlation |\n|---|---|---|---|---|")
    for name, line in table.items():
        rank = f"{line['rank_correlation']:.2f}" if "rank_correlation" in line else ""
        print(f"| {name} | {line['values']} | {line['median_error']:.0%} | {line['bias']:+.0%} | {rank} |")


def held_out(rows: Sequence[Row], rates: Rates, lengths: Known = "known") -> dict[str, Any]:
    """What nothing was fitted to, by phase and by family."""
    found = [point for point in points(rows, rates, lengths) if not point.calibrates and point.counts]
    # Phases of unlike sizes are in order by themselves: ranks are told within each.
    whole = {
        name: value for name, value in summary([p for p in found if p.phase in PHASES]).items() if name[:4] != "rank"
    }
    result: dict[str, Any] = {"phases": by_phase(found), "all phases": whole}
    for family in dict.fromkeys(point.row.family for point in found):
        mine = [point for point in found if point.row.family == family]
        result[family] = by_phase(mine)
    return result


def in_band(rows: Sequence[Row], rates: Rates) -> float:
    """Share of the phases that took what is predicted between the shortest and the longest lengths that are assumed."""
    low, high = (points(rows, rates, end) for end in ("low", "high"))
    pairs = [(one, other) for one, other in zip(low, high, strict=True) if one.counts and one.phase in PHASES]
    return sum(one.predicted <= one.measured <= other.predicted for one, other in pairs) / len(pairs)


def crossed(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Median error of a set's training phases and generation, by the set that the dense rates were fitted to."""
    found: dict[str, dict[str, float]] = {}
    for name, families in SETS.items():
        rates = calibrated([row for row in rows if row.family in families], RATES["H100"], DENSE)
        found[name] = {}
        for other, others in SETS.items():
            mine = [p for p in points([r for r in rows if r.family in others], rates) if p.counts and p.phase in PHASES]
            found[name][other] = summary(mine)["median_error"]
    return found


def memory(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Verdicts on the rows of the table that has them."""
    verdicts = []
    for row in rows:
        if row.family == "grpo-7b":
            ok, most = fits(row)
            published = row.values["oom"] == "0"
            verdicts.append({"row": row.values["number"], "fits": ok, "published": published, "gib": most / GIB})
    return verdicts


def nemo_rl() -> list[dict[str, Any]]:
    """Whole steps of NeMo-RL, predicted with its layouts.

    Published are the layouts and the mean length of a whole sample; that prompts have 150 tokens of it, and how devices are
    shared out where generation runs ahead, is not: the search shares them out.
    """
    found = []
    with NEMO_ROWS.open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        longest = int(row["train_max_seq_len"])
        responses = lognormal(float(row["avg_seq_len"]) - NEMO_PROMPT, ASSUMED_SPREAD, longest - NEMO_PROMPT)
        staleness = 0 if row["policy"] == "on" else int(row["policy"].split("-")[0])
        work = Workload(
            models={ACTOR: QWEN_30B_A3B, ROLLOUT: QWEN_30B_A3B, REFERENCE: QWEN_30B_A3B},
            prompts=int(row["gen_gbs"]) // NEMO_SAMPLES,
            samples_per_prompt=NEMO_SAMPLES,
            mini_batches=int(row["gen_gbs"]) // int(row["train_gbs"]),
            prompt_tokens=NEMO_PROMPT,
            responses=responses,
            longest_sample=longest,
            micro_tokens=(longest, 2 * longest),
            max_running=256,
            staleness=staleness,
        )
        space = Space(
            tp=tuple({int(row["train_tp"]), int(row["gen_tp"])}),
            pp=(int(row["train_pp"]),),
            cp=(int(row["train_cp"]),),
            ep=(int(row["train_ep"]),),
        )
        cluster = make_cluster("H100", int(row["num_gpus"]) // 8)
        apart = {frozenset({ROLLOUT}), frozenset({ACTOR, REFERENCE})}

        def runs(partition: Partition, apart: set[frozenset[str]] = apart, staleness: int = staleness) -> bool:
            return set(map(frozenset, partition)) == apart if staleness else len(partition) == 1

        best = make_plan(work, cluster, space=space, allowed=runs).best
        line = {"row": f"{row['policy']} policy, {row['num_gpus']} devices", "placement": best.describe()}
        found.append({**line, "predicted_s": best.step_s, "measured_s": float(row["step_s"])})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    rows, rates = read_rows(), RATES["H100"]
    result: dict[str, Any] = {}
    if options.fit:
        fitted = calibrated([row for row in rows if row.family == "dapo-7b"], rates, DENSE)
        fitted = calibrated([row for row in rows if row.calibrates_experts], fitted, EXPERTS)
        print({name: float(f"{getattr(fitted, name):.3g}") for name in (*DENSE, *EXPERTS)})
        result["crossed"] = crossed(rows)
        for name, line in result["crossed"].items():
            print(f"fitted to {name:16}", {other: f"{error:.0%}" for other, error in line.items()})
    titles: dict[str, Known] = {
        "lengths known": "known",
        "lengths assumed": "likely",
        "lengths assumed, the family's own left out": "left out",
    }
    for title, lengths in titles.items():
        result[title] = held_out(rows, rates, lengths)
        show(f"{title}, held out", result[title]["phases"] | {"all phases": result[title]["all phases"]})
    result["in band"] = in_band(rows, rates)
    print(f"\nwithin the band of lengths: {result['in band']:.0%} of the phases")
    everything = points(rows, rates)
    show("calibration", by_phase([point for point in everything if point.calibrates]))
    show("rope not fused", by_phase([p for p in everything if p.row.unfused and p.phase in ("update_s", "score_s")]))
    for family in SETS["H100 7B"] + SETS["H100 30B-A3B"] + SETS["H20 7B"] + SETS["H20 14B"]:
        show(family, by_phase([p for p in everything if p.row.family == family and p.counts]))
    print("\n| row | phase | predicted | measured | error | |\n|---|---|---|---|---|---|")
    for point in everything:
        row, off = point.row, point.predicted / point.measured - 1
        name = f"{row.family} {row.values['number']}"
        print(f"| {name} | {point.phase} | {point.predicted:.0f} | {point.measured:g} | {off:+.0%} | {point.use} |")
    result["rows"] = [
        {
            "row": f"{point.row.family} {point.row.values['number']}",
            "phase": point.phase,
            "predicted_s": round(point.predicted, 1),
            "measured_s": point.measured,
            "use": point.use,
        }
        for point in everything
    ]
    result["memory"] = memory(rows)
    right = sum(verdict["fits"] == verdict["published"] for verdict in result["memory"])
    print(f"\nmemory verdicts right: {right} of {len(result['memory'])}")
    result["nemo_rl"] = nemo_rl()
    for line in result["nemo_rl"]:
        print(line)
    write("plan_published", result, None)


if __name__ == "__main__":
    main()
