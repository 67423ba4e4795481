"""What was measured, as a page: made of bench/results/*.json, nothing typed in. One command:

    python -m bench.measured > docs/measured.md

A figure that a result does not have is on no page. What each benchmark does stands in its own file.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support.measure import RESULTS

Result = Any  # what a benchmark wrote
HEAD = """# Measured

Every figure here comes from a file in `bench/results/`, and this page is made of them:
`python -m bench.measured > docs/measured.md`. A row's command measures it again. All was measured on CPUs; nothing of megarl was
ever run on CUDA. Where a result has no machine and no date, it was written before results had them.

| command | measured against | seen | machine | date |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """One result. against: what the figures are beside. seen: the figures, made of what the benchmark wrote."""

    name: str
    against: str
    seen: Callable[[Result], str]
    command: str = ""  # where it is not the module of that name


def _range(values: Iterable[float], form: str = ".2f") -> str:
    found = sorted(values)
    low, high = format(found[0], form), format(found[-1], form)
    return low if low == high else f"{low} to {high}"


def _quickstart_seeds(result: Result) -> str:
    runs = "; ".join(
        f"seed {run['seed']}: {run['before']:.3f} before GRPO, {run['after']:.3f} after, SFT {run['sft_s']:.0f} s, "
        f"GRPO {run['grpo_s']:.0f} s"
        for run in result
    )
    return f"{runs}. Rollout and trainer at most {max(run['logprob_diff_max'] for run in result):.1g} nats apart"


def _learning_curves(result: Result) -> str:
    runs = "; ".join(
        f"{run['algorithm']} (seed {run['seed']}) {run['before']:.2f} to {run['after']:.3f} in {run['seconds']:.0f} s"
        for run in result
    )
    return f"held-out accuracy: {runs}"


def _rollout_overhead(result: Result) -> str:
    low, high = result["ratio_interval"]
    return (
        f"{result['ratio']:.2f} of its tokens/s (95% interval {low:.2f} to {high:.2f}); greedy answers equal, "
        f"{result['greedy_equal']} of {result['greedy_prompts']}"
    )


def _collector(result: Result) -> str:
    by_count = {count: [one["rate"] / 1e6 for one in spent] for count, spent in result["collectors"].items()}
    peak = max(one["peak_bytes"] for spent in result["collectors"].values() for one in spent)
    each = ", ".join(
        f"{_range(rates, '.2f')} ({count} collector{'s' * (count != '1')})" for count, rates in by_count.items()
    )
    whole = "".join(f"; a step of {name}: {_collected(made)}" for name, made in result.get("steps", {}).items())
    return f"M tokens a CPU second of each collector: {each}; most held {peak / 2**30:.2f} GiB{whole}"


def _collected(made: Sequence[Sequence[Mapping[str, float]]]) -> str:
    """Of each collector its steps, the first ones in memory that nobody has touched before."""
    held = max(steps[-1]["peak_bytes"] / steps[-1]["num_tokens"] for steps in made)
    least = max((steps[-1]["sample_bytes"] + steps[-1]["text_bytes"]) / steps[-1]["num_tokens"] for steps in made)
    ready, first = (_range([steps[at]["ready_s"] for steps in made]) for at in (-1, 0))
    return (
        f"{held:.1f} bytes a token held at most (samples and texts {least:.1f}), blocks ready {ready} s after the last answer "
        f"({first} s in the first step)"
    )


def _rollout_simulation(result: Result) -> str:
    first = result["rows"][0]
    rows = "; ".join(
        f"{row['name']}: {first['step_s'] / row['step_s']:.2f} times the speed, servers idle {row['servers_idle']:.0%}, ranks "
        f"{row['ranks_idle']:.0%}, {row['staleness_mean']:.2f} versions behind"
        for row in result["rows"]
    )
    return f"simulated: {rows}. The table took {result['cpu_s']:.1f} s of CPU time (limit {result['limit_s']:g} s)"


def _asynchronous(result: Result) -> str:
    rows = []
    for name, ratios in result["ratios"].items():
        idle = statistics.median(one["servers_idle"] for one in result["turns"][name])
        rows.append(f"{name}: {statistics.median(ratios):.2f} ({_range(ratios)}), servers idle {idle:.0%}")
    return f"{'; '.join(rows)}. Load before each run: {_range(result['loads'], '.0f')}"


def _asynchronous_learn(result: Result) -> str:
    sides = "; ".join(
        f"{side}: {', '.join(f'{value:.3f}' for value in by_seed.values())}"
        for side, by_seed in result["accuracy"].items()
    )
    return f"held-out accuracy after {result['steps']} steps, by seed: {sides}"


def _chaos(result: Result) -> str:
    struck, peace = result["struck"], result["in_peace"]
    back = [each["back_after_s"] for each in struck["strikes"] if each["back_after_s"] is not None]
    return (
        f"{len(struck['strikes'])} kills and freezes over {struck['steps']} steps: {struck['samples_lost']:.0f} samples lost, "
        f"back after {_range(back, '.0f')} s (median {statistics.median(back):.0f} s); reward {struck['reward_after']:.3f} "
        f"(in peace {peace['reward_after']:.3f}), held-out reward {struck['eval_reward']:.3f} ({peace['eval_reward']:.3f}); "
        f"{struck['seconds']:.0f} s ({peace['seconds']:.0f} s)"
    )


def _kills(result: Result) -> str:
    cells = result["cells"]
    same = sum(cell["same_weights"] and cell["same_metrics"] for cell in cells)
    ends = {word: sum(cell["then"] == word for cell in cells) for word in ("went on", "recovered", "ended")}
    return (
        f"{len(cells)} kinds of process and phases killed: {same} the same; {ends['went on']} runs went on, {ends['recovered']} "
        f"recovered by themselves, {ends['ended']} ended and were gone on with"
    )


def _save_kills(result: Result) -> str:
    sides = "; ".join(
        f"{name}: {side['kills']} kills in {len(side['parts'])} parts of {side['operations']} operations, "
        f"{side['others_chosen']} half-written ones chosen, {side['not_to_the_bit']} not to the bit, at most "
        f"{side['repeated_most']} step{'s' * (side['repeated_most'] != 1)} done again"
        for name, side in result["sides"].items()
    )
    return f"saves {sides}"


def _async_kills(result: Result) -> str:
    book, replay = result["book"], result["replay"]
    return (
        f"{sum(each['met'] for each in result['kills'])} kills over {result['steps']} steps, {result['recoveries']} recoveries, "
        f"{result['continued']} goings on: of {book['groups']} groups {book['lost']} lost, {book['taken_twice']} trained on "
        f"twice, at most {book['staleness_max']:.0f} versions behind; replayed in {replay['seconds']:.0f} s, weights "
        f"{'the same' if replay['same_weights'] else 'others'}"
    )


def _soak(result: Result) -> str:
    kinds = result["kinds"]
    first, last = (sum(row["own_bytes"][at] for row in kinds.values()) / 2**20 for at in (0, 1))
    files = [sum(row["descriptors"][at] for row in kinds.values()) for at in (0, 1)]
    threads = [sum(row["threads"][at] for row in kinds.values()) for at in (0, 1)]
    grows = sum(each["a_step"] for each in result["folder"].values())
    return (
        f"{result['steps']} steps in {result['seconds']:.0f} s, first to last quarter: {first:.0f} to {last:.0f} MiB of "
        f"{len(kinds)} kinds of process, {threads[0]:.0f} to {threads[1]:.0f} threads, {files[0]:.0f} to {files[1]:.0f} "
        f"descriptors; the folder by {grows:.0f} bytes a step; grown: {'; '.join(result['grown']) or 'nothing'}. The journal "
        f"took {result['journal_share']:.2%} of a step's seconds"
    )


def _recovery(result: Result) -> str:
    recovered, continued = ([each["seconds"] for each in result[name]] for name in ("recovered", "continued"))
    return (
        f"from the death of a rank to a further step {_range(recovered, '.0f')} s; from a new start's command "
        f"{_range(continued, '.0f')} s; the first start {result['first_start_s']:.0f} s"
    )


def _journal(result: Result) -> str:
    run = result["in_a_run"]
    return (
        f"a million tokens: {result['write_s_per_million']:.2f} s to write, each wave on the disk before it counts "
        f"({result['write_cpu_s_per_million']:.2f} CPU s), {result['read_s_per_million']:.2f} s to read back; "
        f"{result['bytes_per_token']:.1f} bytes a token; of a run's steps of {run['tokens_a_step']:,.0f} tokens in "
        f"{run['step_s']:.1f} s, {run['share']:.2%} (limit 1%)"
    )


def _sample_store(result: Result) -> str:
    rates = "; ".join(
        f"{name}: {each['write']:.2f} GB/s written, {each['read']:.2f} read and summed up"
        for name, each in result["rates"].items()
    )
    return f"{result['blocks']} blocks of {result['bytes'] / 2**20:.0f} MiB: {rates}"


def _start(result: Result) -> str:
    best = min(result["runs"], key=lambda run: run["cpu_s"])
    largest = sorted(best["processes"].items(), key=lambda item: -item[1]["cpu_s"])[:5]
    parts = ", ".join(f"{name} {row['cpu_s']:.1f}" for name, row in largest)
    ready, spent = ([run[key] for run in result["runs"]] for key in ("ready_s", "cpu_s"))
    return f"ready after {_range(ready, '.1f')} s, {_range(spent, '.1f')} CPU seconds, of them {parts}"


def _driver_overhead(result: Result) -> str:
    outside = {name: each["outside_waits_s"] for name, each in result["results"].items()}
    shares = [each["cpu_s"] / result["real_step_s"] for each in result["results"].values()]
    each = ", ".join(f"{seconds * 1e3:.1f} ms ({name})" for name, seconds in outside.items())
    growth = result["growth"]["outside_waits_s"]
    return (
        f"{_range(shares, '.1%')} of a step as CPU time; outside of waits, by samples: {each}; x{growth:.2f} from few to many "
        "samples in steps of the same length"
    )


def _parallel_invariance(result: Result) -> str:
    kept = [each for each in result["differences"] if each["kind"] != "control"]
    measures = ("logprobs", "losses", "gradients", "weights")
    largest = max(each[name] for each in kept for name in measures if each[name] is not None)
    alone = [each for each in kept if each["kind"] == "alone"]
    cases = len({each["case"] for each in alone})
    layouts = len({each["layout"].partition(",")[0] for each in alone})
    return f"{cases} cases over {layouts} layouts: at most {largest:.1e} apart (bound {result['bound']:g})"


def _packing(result: Result) -> str:
    return (
        f"{result['speed_up']['median']:.2f} times the speed, with {result['padding_removed']:.2f} times fewer tokens; "
        f"log-probs at most {result['largest_difference']:.1e} apart"
    )


def _bare_speed(result: Result) -> str:
    return "; ".join(
        f"{row['loss']}, {row['threads']} thread{'s' * (row['threads'] > 1)}: {row['ratio']['median']:.2f} "
        f"({row['ratio']['lowest']:.2f} to {row['ratio']['highest']:.2f})"
        for row in result["rows"]
    )


def _load(result: Result) -> str:
    extra = _range((row["peak_over_share"] - 1 for row in result["rows"]), ".1%")
    rows = "; ".join(
        f"{row['layout']}, {row['state']} files: a load takes {row['load_over_cat']['median']:.2f} of `cat` into memory, "
        f"reading {row['read_over_cat']['median']:.2f}"
        for row in result["rows"]
    )
    return f"peak memory {extra} beyond a rank's share; {rows}"


def _logprob_memory(result: Result) -> str:
    speed = [row["naive"]["seconds"] / row["megarl"]["seconds"] for row in result["rows"]]
    shares = _range((row["peak_ratio"] for row in result["rows"]), ".3f")
    return f"{shares} of its peak beyond the logits; {_range(speed, '.0f')} times faster"


def _reward_model(result: Result) -> str:
    styles = ", ".join(f"{each['accuracy']:.2f} ({name})" for name, each in result["by_style"].items())
    return (
        f"held-out pairs the right way round: {result['before']:.2f} before, {result['after']:.2f} after, in "
        f"{result['seconds']:.0f} s. In transformers: {styles}"
    )


def _ppo_reward_model(result: Result) -> str:
    score, held_out = result["score"], list(result["held_out_accuracy"].values())
    return (
        f"score {score['before']:.2f} to {score['after']:.2f}; right answers, which nothing rewards, {held_out[0]:.2f} to "
        f"{held_out[-1]:.2f}"
    )


def _plan_vs_measured(result: Result) -> str:
    summary = result["summary"]
    return (
        f"{summary['placements']} placements: median error of a step {summary['median_error']:.1%}; the pick took "
        f"{summary['pick_over_fastest']:.2f} of the fastest"
    )


def _plan_published(result: Result) -> str:
    return "; ".join(
        f"{name}: median error over all phases {each['all phases']['median_error']:.1%}"
        for name, each in result.items()
        if isinstance(each, dict) and "all phases" in each
    )


def _recipes_published(result: Result) -> str:
    known = [row for row in result["rows"] if "run" in row]
    ratios = [row["tokens_s"]["planned"] / row["tokens_s"]["published"] for row in known]
    slower = [row["step_s"] / row["pick"]["step_s"] for row in result["rows"]]
    return (
        f"planned, not measured: tokens/s of a device over those of {len(known)} published runs: {_range(ratios)}, in steps of "
        f"fewer and longer samples; the recipes' own placements take {_range(slower)} times as long as the search's picks"
    )


def _hybridflow(result: Result) -> str:
    variants = "; ".join(f"{name}: at most {each['most']}" for name, each in result["variants"].items())
    return (
        f"{result['agree']} of {result['of']} by rates close to our table's, {result['at_our_rates']} at exactly ours. In "
        f"{result['draws']} draws of the rates, {variants}"
    )


def _plan(result: Result) -> str:
    return "; ".join(
        f"{line['devices']:,} devices: {line['seconds']:.2f} s (limit {line['limit_s']:g} s), {line['peak_mib']:.0f} MiB"
        for line in result["speed"]
    )


def _placements(result: Result) -> str:
    largest = max(value for run in result["runs"].values() for value in run["losses"].values())
    rested = "equal to the bit" if result["bit_equal_at_rest"] else "not equal to the bit"
    return f"losses over {result['steps']} steps of PPO at most {largest:.0e} apart; offloaded between turns: {rested}"


def _submit(result: Result) -> str:
    total = result["totals_s"]
    start = statistics.median(run["start"] for run in result["runs"])
    return (
        f"{statistics.median(total):.1f} s ({_range(total, '.1f')}; limit {result['limit_s']:g} s), {start:.1f} of them "
        "servers, ranks and the first sync"
    )


def _balance(result: Result) -> str:
    rows = result["rows"]
    return (
        f"heaviest rank {_range((row['heaviest'] for row in rows), '.4f')} of the mean, micro-batches "
        f"{_range(row['micro_batches'] for row in rows)} of the bound; {_range((row['seconds'] * 1e3 for row in rows), '.0f')} ms"
    )


def _header_fuzz(result: Result) -> str:
    kinds = ("read alike", "refused by both", "refused by megarl alone", "read otherwise", "traceback")
    return f"{result['files']:,} files: " + ", ".join(f"{kind}: {result[kind]:,}" for kind in kinds)


def _peers_trl(result: Result) -> str:
    def rates(form: str) -> str:
        return f"{form} {_range((one['tokens_per_s'] for one in result['steps']['forms'][form]), ',.0f')}"

    found = [", ".join(map(rates, result["steps"]["forms"]))]
    over = ", ".join(f"{form} {ratio:.2f}" for form, ratio in result["steps"]["ratios"].items())
    found.append(f"over TRL's fastest of the same dtype: {over}")
    for form, one in result.get("quickstart", {}).items():
        found.append(
            f"quickstart to 0.9, {form}: {one['seconds']:.0f} s after {one['start_s']:.0f} s of start, "
            f"{one['tokens']:,} tokens"
        )
    loads = [one["load"] for some in result["steps"]["forms"].values() for one in some]
    return f"tokens/s of whole steps: {'; '.join(found)}. Load after each run {_range(loads, '.1f')}"


def _peers_algorithms(result: Result) -> str:
    rows, batch = result["rows"], result["batch"]
    ratios = [row["verl_s"] / row["megarl_s"] for row in rows]
    apart = sum(row["factor"] != 1 for row in rows)
    return (
        f"{len(rows)} advantages, losses (with gradients) and KLs of {batch['samples']} samples, {batch['trained']:,} trained "
        f"tokens: equal to {max(row['error'] for row in rows):.1g} of the largest number, {apart} of them by a known factor; "
        f"verl's seconds on padded tensors over megarl's: {statistics.median(ratios):.1f} (median), {_range(ratios, '.1f')}. "
        f"{len(result['differences'])} differences on purpose, with their reasons, are in the file"
    )


def _memory_predicted(result: Result) -> str:
    found = result["summary"]
    return (
        f"{found['layouts']} layouts of 1 to 4 ranks: the peak is predicted within {found['median']:.1%} (median) and "
        f"{found['worst']:.1%} (worst), what comes on top of weights and optimizer within {found['working_median']:.1%} and "
        f"{found['working_worst']:.1%}"
    )


def _layer_memory(result: Result) -> str:
    rows = result["rows"]
    return (
        f"{len(rows)} of layers of {len({row['model'] for row in rows})} models: what a layer keeps is planned within "
        f"{max(abs(row['kept_error']) for row in rows):.1%}, what its backward pass takes beside within "
        f"{max(abs(row['extra_error']) for row in rows):.1%}"
    )


def _deterministic(result: Result) -> str:
    slower, cpu, equal = result["slower"], result["more_cpu"], result["equal_samples"]
    return (
        f"{equal['deterministic']} of {result['samples']} samples equal in every turn ({equal['default']} by default), at "
        f"{slower['median']:.2f} of the seconds ({slower['lowest']:.2f} to {slower['highest']:.2f}) and "
        f"{cpu['median']:.2f} of the CPU seconds ({cpu['lowest']:.2f} to {cpu['highest']:.2f})"
    )


def _server_sleep(result: Result) -> str:
    mib = ", ".join(f"{value:,.0f} MiB {name}" for name, value in result["mib"].items())
    answers = "the same answers after" if result["same_answers"] else "other answers after"
    return f"on {result['platform']}: {mib}; {answers}"


def _weight_sync(result: Result) -> str:
    size = result["bytes"]
    rows = "; ".join(
        f"{row['layout']} {row['transport'].replace('_', ' ')} {row['seconds']:.2f} s, {row['of']:.0%} of its bound"
        for row in result["rows"]
    )
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


def _weight_sync_layouts(result: Result) -> str:
    rows = result["rows"]
    layouts = len({(row["model"], row["layout"]) for row in rows})
    return f"{sum(row['tensors'] > 0 for row in rows)} of {len(rows)} syncs equal, all bits of all tensors; {layouts} layouts"


def _disk_sync(result: Result) -> str:
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


def _algorithms(result: Result) -> str:
    costs = "; ".join(
        f"{name} {cost['cpu_ms']:.1f} ms" + (f" (loop {cost['loop_ms']:,.0f} ms)" if cost["loop_ms"] else "")
        for name, cost in result["costs"].items()
    )
    return f"of {result['num_tokens']:,} tokens in {result['num_samples']:,} samples: {costs}"


def _agent_load(result: Result) -> str:
    ways = result["ways"]
    bare = ways["bare"]
    said = [
        f"{name}: {way['turns_per_s'] / bare['turns_per_s']:.0%} of {bare['turns_per_s']:.0f} turns/s, "
        f"{way['turn_ms'] - bare['turn_ms']:.2f} ms added to a turn, {way['peak_mib']:.0f} MiB at most"
        for name, way in ways.items()
        if name != "bare"
    ]
    return f"{result['episodes']} episodes of {result['turns']} turns at once; {'; '.join(said)}"


def _sandbox(result: Result) -> str:
    def both(name: str) -> str:
        return f"{result[name]['median']:.1f} ms (p95 {result[name]['p95']:.1f})"

    several, rate = result["at_once"], result["rate"]
    each = several["pss_bytes"] / several["asked"] / 2**20
    return (
        f"until the program runs: {both('pooled_ms')} pooled, {both('cold_ms')} where none waits, {both('bare_ms')} bare; a run "
        f"until its result {both('run_ms')}; {rate['per_s']:.0f} runs/s, {rate['cpu_ms']:.0f} CPU ms each; "
        f"{several['overlapped']} of {several['asked']} at once, all running after {several['all_running_s']:.1f} s, "
        f"{each:.1f} MiB each, gone "
        f"{several['closed_s']:.1f} s after the last ended. Memory by {result['memory']}"
    )


ROWS = (
    Row("quickstart_seeds", "three seeds from nothing; 200 held-out prompts, greedy", _quickstart_seeds),
    Row("learning_curves", "the same task before training", _learning_curves),
    Row("rollout_overhead", "a bare asyncio client on the same server, same prompts", _rollout_overhead),
    Row("collector", "stub servers that answer 8,192 tokens at once; target 2 M", _collector),
    Row("sample_store", "straw-queue, on the same blocks", _sample_store),
    Row("chaos", "the same run in peace", _chaos),
    Row("save_kills", "a run in peace, weights bit for bit at every step; limits one and two steps done again", _save_kills),
    Row("async_kills", "`megarl replay` of its journal, without servers, weights bit for bit", _async_kills),
    Row("soak", "the first quarter of its steps", _soak),
    Row("recovery", "a new start; limit 30 s", _recovery),
    Row("kills", "the same run in peace, weights and metrics bit for bit", _kills),
    Row("journal", "nothing: the journal alone, on this machine's disk", _journal),
    Row("rollout_simulation", "the synchronous run; 512 servers, 65,536 samples each", _rollout_simulation),
    Row(
        "asynchronous",
        "tokens/s of the synchronous run of the same turn; targets 1.5 split, 1.2 colocated, servers idle below 10%",
        _asynchronous,
    ),
    Row(
        "asynchronous_learn",
        "the synchronous seeds' spread, on the quickstart's task",
        _asynchronous_learn,
        "python -m bench.asynchronous --learn",
    ),
    Row("peers_trl", "TRL 1.16.0 on the same model, prompts and reward; target 2.5", _peers_trl),
    Row("peers_algorithms", "verl 0.9.1's core_algos on the same batch, one thread", _peers_algorithms),
    Row("start", "every process of the quickstart, from the command to the first request for a sample", _start),
    Row("driver_overhead", "the seconds of a quickstart step", _driver_overhead),
    Row("parallel_invariance", "one rank; [every case](parallel_invariance.md)", _parallel_invariance),
    Row("packing", "the same sequences padded, log-normal lengths", _packing),
    Row("bare_speed", "a hand-written loop over transformers, the fastest of three forms: its seconds over ours", _bare_speed),
    Row("load", "`cat` of the same checkpoint in the same turn", _load),
    Row("logprob_memory", "the whole matrix of log-probs, 4,096 tokens at a vocabulary of 151,936", _logprob_memory),
    Row("reward_model", "chance, 0.5", _reward_model),
    Row("ppo_reward_model", "the same before PPO", _ppo_reward_model),
    Row("plan_vs_measured", "real runs of 2 to 4 ranks, beside predictions from `megarl profile`", _plan_vs_measured),
    Row("plan_published", "measurements that others published ([placement](placement.md))", _plan_published),
    Row("recipes_published", "published runs of the same size ([placement](placement.md))", _recipes_published),
    Row("hybridflow", "HybridFlow's 16 published winners ([placement](placement.md))", _hybridflow),
    Row("plan", "limits of the search for PPO's five roles", _plan),
    Row("placements", "the first of four named placements, same rollouts", _placements),
    Row(
        "submit",
        "90 s from `megarl submit` to the first token, SLURM over three nodes (namespaces)",
        _submit,
        "python bench/submit.py",
    ),
    Row("balance", "lower bounds, 16,384 samples over 128 ranks", _balance),
    Row("header_fuzz", "the safetensors library, on files with broken headers", _header_fuzz),
    Row("memory_predicted", "the engine's own live bytes ([placement](placement.md))", _memory_predicted),
    Row("layer_memory", "torch's fake tensors at the widths of real models ([placement](placement.md))", _layer_memory),
    Row("deterministic", "the same server by default ([the same run twice](determinism.md))", _deterministic),
    Row("server_sleep", "the server awake", _server_sleep),
    Row("weight_sync", "shared memory: memcpy once, target 40%; broadcast: a bare one, target 70%", _weight_sync),
    Row(
        "weight_sync_layouts",
        "the trainer's export, by the engine's hashes, at every layout to servers of tp 1 and 2 ([all](weight_sync_layouts.md))",
        _weight_sync_layouts,
    ),
    Row("disk_sync", "whole versions; what AdamW changes by learning rate ([weight sync](weight_sync.md))", _disk_sync),
    Row("algorithms", "plain loops", _algorithms),
    Row("agent_load", "a bare asyncio client at a stub that answers at once; targets 90% and 2 ms", _agent_load),
    Row("sandbox", "a Python without a sandbox, started each time; target 20 ms pooled, 200 at once", _sandbox),
)  # fmt: skip


def render(folder: Path = RESULTS) -> str:
    """The page."""
    lines = []
    for row in ROWS:
        result = json.loads((folder / f"{row.name}.json").read_text())
        host = result.get("host") if isinstance(result, dict) else None
        machine, date = _machine(host if isinstance(host, dict) else {})
        command = row.command or f"python -m bench.{row.name}"
        lines.append(f"| `{command}` | {row.against} | {row.seen(result)} | {machine} | {date} |\n")
    return HEAD + "".join(lines)


def _machine(host: dict[str, Any]) -> tuple[str, str]:
    """What a result says of its machine, and when it was."""
    if not host:
        return "", ""
    name = host.get("cpu") or host["machine"]
    return f"{name}, {host['cores']} cores, load {host['load_average']:.1f}", host.get("date", "")


if __name__ == "__main__":
    print(render(), end="")
