"""What benchmarks of the engine, of weights and of the planner have seen: a sentence each, for bench/measured.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Result = Any  # what a benchmark wrote


def span(values: Iterable[float], form: str = ".2f") -> str:
    """The least and the greatest, or the one that they are."""
    found = sorted(values)
    low, high = format(found[0], form), format(found[-1], form)
    return low if low == high else f"{low} to {high}"


def parallel_invariance(result: Result) -> str:
    kept = [each for each in result["differences"] if each["kind"] != "control"]
    measures = ("logprobs", "losses", "gradients", "weights")
    largest = max(each[name] for each in kept for name in measures if each[name] is not None)
    alone = [each for each in kept if each["kind"] == "alone"]
    cases = len({each["case"] for each in alone})
    layouts = len({each["layout"].partition(",")[0] for each in alone})
    return f"{cases} cases over {layouts} layouts: at most {largest:.1e} apart (bound {result['bound']:g})"


def packing(result: Result) -> str:
    return (
        f"{result['speed_up']['median']:.2f} times the speed, with {result['padding_removed']:.2f} times fewer tokens; "
        f"log-probs at most {result['largest_difference']:.1e} apart"
    )


def bare_speed(result: Result) -> str:
    return "; ".join(
        f"{row['loss']}, {row['threads']} thread{'s' * (row['threads'] > 1)}: {row['ratio']['median']:.2f} "
        f"({row['ratio']['lowest']:.2f} to {row['ratio']['highest']:.2f})"
        for row in result["rows"]
    )


def load(result: Result) -> str:
    extra = span((row["peak_over_share"] - 1 for row in result["rows"]), ".1%")
    rows = "; ".join(
        f"{row['layout']}, {row['state']} files: a load takes {row['load_over_cat']['median']:.2f} of `cat` into memory, "
        f"reading {row['read_over_cat']['median']:.2f}"
        for row in result["rows"]
    )
    return f"peak memory {extra} beyond a rank's share; {rows}"


def checkpoint_memory(result: Result) -> str:
    sides = {side: [row for row in result["rows"] if row["side"] == side] for side in ("megarl", "megatron-core")}
    rows = []
    for mine, theirs in zip(*sides.values(), strict=True):
        faster = [theirs[f"{name}_seconds"]["median"] / mine[f"{name}_seconds"]["median"] for name in ("save", "load")]
        rows.append(
            f"{mine['ranks']} ranks: {mine['save_peak']:.1f} against {theirs['save_peak']:.1f} to save, {mine['load_peak']:.1f} "
            f"against {theirs['load_peak']:.1f} to load, {faster[0]:.1f} and {faster[1]:.1f} times as fast"
        )
    return "peak memory in parts of a rank; " + "; ".join(rows)


def logprob_memory(result: Result) -> str:
    speed = [row["naive"]["seconds"] / row["megarl"]["seconds"] for row in result["rows"]]
    shares = span((row["peak_ratio"] for row in result["rows"]), ".3f")
    return f"{shares} of its peak beyond the logits; {span(speed, '.0f')} times faster"


def plan_vs_measured(result: Result) -> str:
    summary = result["summary"]
    return (
        f"{summary['placements']} placements: median error of a step {summary['median_error']:.1%}; the one predicted "
        f"fastest took {summary['pick_over_fastest']:.2f} of the fastest"
    )


def plan_published(result: Result) -> str:
    return "; ".join(
        f"{name}: median error over all phases {each['all phases']['median_error']:.1%}"
        for name, each in result.items()
        if isinstance(each, dict) and "all phases" in each
    )


def recipes_published(result: Result) -> str:
    known = [row for row in result["rows"] if "run" in row]
    ratios = [row["tokens_s"]["planned"] / row["tokens_s"]["published"] for row in known]
    slower = [row["step_s"] / row["pick"]["step_s"] for row in result["rows"]]
    return (
        f"planned, not measured: tokens/s of a device over those of {len(known)} published runs: {span(ratios)}, in steps of "
        f"fewer and longer samples; the recipes' own placements take {span(slower)} times as long as the search's picks"
    )


def hybridflow(result: Result) -> str:
    variants = "; ".join(f"{name}: at most {each['most']}" for name, each in result["variants"].items())
    return (
        f"{result['agree']} of {result['of']} by rates close to our table's, {result['at_our_rates']} at exactly ours. In "
        f"{result['draws']} draws of the rates, {variants}"
    )


def plan(result: Result) -> str:
    return "; ".join(
        f"{line['devices']:,} devices: {line['seconds']:.2f} s (limit {line['limit_s']:g} s), {line['peak_mib']:.0f} MiB"
        for line in result["speed"]
    )


def placements(result: Result) -> str:
    largest = max(value for run in result["runs"].values() for value in run["losses"].values())
    rested = "equal to the bit" if result["bit_equal_at_rest"] else "not equal to the bit"
    return f"losses over {result['steps']} steps of PPO at most {largest:.0e} apart; offloaded between turns: {rested}"


def submit(result: Result) -> str:
    total = result["totals_s"]
    start = statistics.median(run["start"] for run in result["runs"])
    return (
        f"{statistics.median(total):.1f} s ({span(total, '.1f')}; limit {result['limit_s']:g} s), {start:.1f} of them "
        "servers, ranks and the first sync"
    )


def balance(result: Result) -> str:
    rows = result["rows"]
    return (
        f"heaviest rank {span((row['heaviest'] for row in rows), '.4f')} of the mean, micro-batches "
        f"{span(row['micro_batches'] for row in rows)} of the bound; {span((row['seconds'] * 1e3 for row in rows), '.0f')} ms"
    )


def header_fuzz(result: Result) -> str:
    kinds = ("read alike", "refused by both", "refused by megarl alone", "read otherwise", "traceback")
    return f"{result['files']:,} files: " + ", ".join(f"{kind}: {result[kind]:,}" for kind in kinds)


def memory_predicted(result: Result) -> str:
    found = result["summary"]
    return (
        f"{found['layouts']} layouts of 1 to 4 ranks: the peak is predicted within {found['median']:.1%} (median) and "
        f"{found['worst']:.1%} (worst), what comes on top of weights and optimizer within {found['working_median']:.1%} and "
        f"{found['working_worst']:.1%}"
    )


def layer_memory(result: Result) -> str:
    rows = result["rows"]
    return (
        f"{len(rows)} of layers of {len({row['model'] for row in rows})} models: what a layer keeps is planned within "
        f"{max(abs(row['kept_error']) for row in rows):.1%}, what its backward pass takes beside within "
        f"{max(abs(row['extra_error']) for row in rows):.1%}"
    )


def server_sleep(result: Result) -> str:
    mib = ", ".join(f"{value:,.0f} MiB {name}" for name, value in result["mib"].items())
    answers = "the same answers after" if result["same_answers"] else "other answers after"
    return f"on {result['platform']}: {mib}; {answers}"


def served_models(result: Result) -> str:
    rows = result["rows"]
    served, refused = ([row["difference"] for row in rows if bool(row["refused"]) == each] for each in (False, True))
    good, apart = ([each for each in side if each is not None] for side in (served, refused))
    silent = f", {len(served) - len(good)} without an answer" if len(good) < len(served) else ""
    return (
        f"{len(served)} configs of {len({row['family'] for row in rows})} families are served: at most {max(good):.1e} nats "
        f"apart{silent}; {len(refused)} are refused: at least {min(apart):.1e} apart, or no answer at all "
        f"({len(refused) - len(apart)}); {sum(each <= result['bound'] for each in apart)} of them for nothing"
    )


def weight_sync(result: Result) -> str:
    size = result["bytes"]
    rows = "; ".join(
        f"{row['layout']} {row['transport'].replace('_', ' ')} {row['seconds']:.2f} s, {row['of']:.0%} of its bound"
        for row in result["rows"]
    )
    ends = span((row["pieces"]["commit"] for row in result["rows"]), ".2f")
    rows += f"; of each {ends} s at the end, in which a server on a CPU lays its weights out for its kernels"
    equal = "all answers equal" if all(row["equal"] for row in result["rows"]) else "answers that differ"
    memcpy, bare = size / result["memcpy_s"] / 1e9, size / result["bare_broadcast_s"] / 1e9
    alone = ""
    if "server_alone" in result:
        serial, shared = (result["server_alone"][key] for key in ("serial_s", "shared_s"))
        alone = (
            f"; a server's own load with nothing of megarl between: {shared:.2f} s shared memory "
            f"({result['memcpy_s'] / shared:.0%}), {serial:.2f} s broadcast ({result['bare_broadcast_s'] / serial:.0%})"
        )
    return f"{size / 1e6:,.0f} MB, memcpy {memcpy:.1f} GB/s, bare broadcast {bare:.2f} GB/s: {rows}{alone}; {equal}"


def weight_sync_layouts(result: Result) -> str:
    rows = result["rows"]
    layouts = len({(row["model"], row["layout"]) for row in rows})
    return f"{sum(row['tensors'] > 0 for row in rows)} of {len(rows)} syncs equal, all bits of all tensors; {layouts} layouts"


def disk_sync(result: Result) -> str:
    def median(rows: Sequence[Result], name: str) -> str:
        return f"{statistics.median(row[name] for row in rows):.1f} s"

    def seconds(rows: Sequence[Result]) -> str:
        steps = {"written": "write_s", "put together": "together_s", "loaded": "load_s"}
        return ", ".join(f"{step} {median(rows, name)}" for step, name in steps.items())

    found = []
    for dtype in dict.fromkeys(row["dtype"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["dtype"] == dtype]
        whole, changes = ([row for row in rows if row["whole"] is kind] for kind in (True, False))
        ratios = ", ".join(
            f"{statistics.mean(row['of'] for row in changes if row['rate'] == rate):.1%} at {rate:g}"
            for rate in dict.fromkeys(row["rate"] for row in changes)
        )
        size = f"{whole[0]['bytes'] / 1e6:,.0f} MB"
        found.append(f"{dtype}, {size} whole: {seconds(whole)}; what a step changed: {ratios}; {seconds(changes)}")
    equal = "all answers equal" if all(row.get("equal", True) for row in result["rows"]) else "answers that differ"
    return f"{'. '.join(found)}; {equal}"


def algorithms(result: Result) -> str:
    costs = "; ".join(
        f"{name} {cost['cpu_ms']:.1f} ms" + (f" (loop {cost['loop_ms']:,.0f} ms)" if cost["loop_ms"] else "")
        for name, cost in result["costs"].items()
    )
    return f"of {result['num_tokens']:,} tokens in {result['num_samples']:,} samples: {costs}"
