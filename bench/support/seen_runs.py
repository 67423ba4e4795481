"""What benchmarks of whole runs, of who feeds them, and beside peers, have seen: a sentence each, for bench/measured.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from bench.support.seen_parts import Result, span


def quickstart_seeds(result: Result) -> str:
    runs = "; ".join(
        f"seed {run['seed']}: {run['before']:.3f} before GRPO, {run['after']:.3f} after, SFT {run['sft_s']:.0f} s, "
        f"GRPO {run['grpo_s']:.0f} s"
        for run in result["runs"]
    )
    return (
        f"{runs}. Rollout and trainer at most {max(run['logprob_diff_max'] for run in result['runs']):.1g} nats apart"
    )


def learning_curves(result: Result) -> str:
    runs = "; ".join(
        f"{run['algorithm']} (seed {run['seed']}) {run['before']:.2f} to {run['after']:.3f} in {run['seconds']:.0f} s"
        for run in result["curves"]
    )
    return f"held-out accuracy: {runs}"


def images(result: Result) -> str:
    return "; ".join(
        f"{run['kind']}, tower {run['tower']}: held-out accuracy {run['before']:.2f} to {run['after']:.3f} in "
        f"{run['seconds']:.0f} s, in transformers {run['transformers']:.3f}, with the image of another row "
        f"{run['exchanged']:.3f}, {run['moved']} of the tower's tensors changed"
        for run in result["models"]
    )


def rollout_overhead(result: Result) -> str:
    low, high = result["ratio_interval"]
    return (
        f"{result['ratio']:.2f} of its tokens/s (95% interval {low:.2f} to {high:.2f}); greedy answers equal, "
        f"{result['greedy_equal']} of {result['greedy_prompts']}"
    )


def collector(result: Result) -> str:
    by_count = {count: [one["rate"] / 1e6 for one in spent] for count, spent in result["collectors"].items()}
    peak = max(one["peak_bytes"] for spent in result["collectors"].values() for one in spent)
    each = ", ".join(
        f"{span(rates, '.2f')} ({count} collector{'s' * (count != '1')})" for count, rates in by_count.items()
    )
    whole = "".join(f"; a step of {name}: {_collected(made)}" for name, made in result.get("steps", {}).items())
    return f"M tokens a CPU second of each collector: {each}; most held {peak / 2**30:.2f} GiB{whole}"


def _collected(made: Sequence[Sequence[Mapping[str, float]]]) -> str:
    """Of each collector its steps, the first ones in memory that nobody has touched before."""
    held = max(steps[-1]["peak_bytes"] / steps[-1]["num_tokens"] for steps in made)
    least = max((steps[-1]["sample_bytes"] + steps[-1]["text_bytes"]) / steps[-1]["num_tokens"] for steps in made)
    ready, first = (span([steps[at]["ready_s"] for steps in made]) for at in (-1, 0))
    return (
        f"{held:.1f} bytes a token held at most (samples and texts {least:.1f}), blocks ready {ready} s after the last answer "
        f"({first} s in the first step)"
    )


def rollout_simulation(result: Result) -> str:
    first = result["rows"][0]
    rows = "; ".join(
        f"{row['name']}: {first['step_s'] / row['step_s']:.2f} times the speed, servers idle {row['servers_idle']:.0%}, ranks "
        f"{row['ranks_idle']:.0%}, {row['staleness_mean']:.2f} versions behind"
        for row in result["rows"]
    )
    return f"simulated: {rows}. The table took {result['cpu_s']:.1f} s of CPU time (limit {result['limit_s']:g} s)"


def asynchronous(result: Result) -> str:
    rows = []
    for name, ratios in result["ratios"].items():
        idle = statistics.median(one["servers_idle"] for one in result["turns"][name])
        rows.append(f"{name}: {statistics.median(ratios):.2f} ({span(ratios)}), servers idle {idle:.0%}")
    return f"{'; '.join(rows)}. Load before each run: {span(result['loads'], '.0f')}"


def asynchronous_learn(result: Result) -> str:
    sides = "; ".join(
        f"{side}: {', '.join(f'{value:.3f}' for value in by_seed.values())}"
        for side, by_seed in result["accuracy"].items()
    )
    return f"held-out accuracy after {result['steps']} steps, by seed: {sides}"


def chaos(result: Result) -> str:
    struck, peace = result["struck"], result["in_peace"]
    back = [each["back_after_s"] for each in struck["strikes"] if each["back_after_s"] is not None]
    return (
        f"{len(struck['strikes'])} kills and freezes over {struck['steps']} steps: {struck['samples_lost']:.0f} samples lost, "
        f"back after {span(back, '.0f')} s (median {statistics.median(back):.0f} s); reward {struck['reward_after']:.3f} "
        f"(in peace {peace['reward_after']:.3f}), held-out reward {struck['eval_reward']:.3f} ({peace['eval_reward']:.3f}); "
        f"{struck['seconds']:.0f} s ({peace['seconds']:.0f} s)"
    )


def kills(result: Result) -> str:
    cells = [cell for cell in result["cells"] if cell["then"] != "absent"]
    same = sum(bool(cell.get("same_weights") and cell.get("same_metrics")) for cell in cells)
    ends = {word: sum(cell["then"] == word for cell in cells) for word in ("went on", "recovered", "ended")}
    return (
        f"{len(cells)} kinds of process and phases killed: {same} the same; {ends['went on']} runs went on, {ends['recovered']} "
        f"recovered by themselves, {ends['ended']} ended and were gone on with"
    )


def save_kills(result: Result) -> str:
    sides = "; ".join(
        f"{name}: {side['kills']} kills in {len(side['parts'])} parts of {side['operations']} operations, "
        f"{side['others_chosen']} half-written ones chosen, {side['not_to_the_bit']} not to the bit, at most "
        f"{side['repeated_most']} step{'s' * (side['repeated_most'] != 1)} done again"
        for name, side in result["sides"].items()
    )
    return f"saves {sides}"


def async_kills(result: Result) -> str:
    book, replay = result["book"], result["replay"]
    return (
        f"{sum(each['met'] for each in result['kills'])} kills over {result['steps']} steps, {result['recoveries']} recoveries, "
        f"{result['continued']} goings on: of {book['groups']} groups {book['lost']} lost, {book['taken_twice']} trained on "
        f"twice, at most {book['staleness_max']:.0f} versions behind; replayed in {replay['seconds']:.0f} s, weights "
        f"{'the same' if replay['same_weights'] else 'others'}"
    )


def soak(result: Result) -> str:
    kinds = result["kinds"]
    first, last = (sum(row["own_bytes"][at] for row in kinds.values()) / 2**20 for at in (0, 1))
    files = [sum(row["descriptors"][at] for row in kinds.values()) for at in (0, 1)]
    threads = [sum(row["threads"][at] for row in kinds.values()) for at in (0, 1)]
    grows = sum(each["a_step"] for each in result["folder"].values())
    return (
        f"{result['steps']} steps, of {result['lengths']} different numbers of tokens, in {result['seconds']:.0f} s, first to "
        f"last quarter: {first:.0f} to {last:.0f} MiB of {len(kinds)} kinds of process, {threads[0]:.0f} to {threads[1]:.0f} "
        f"threads, {files[0]:.0f} to {files[1]:.0f} descriptors; the folder by {grows:.0f} bytes a step; grown: "
        f"{'; '.join(result['grown']) or 'nothing'}. The journal "
        f"took {result['journal_share']:.2%} of a step's seconds"
    )


def recovery(result: Result) -> str:
    recovered, continued = ([each["seconds"] for each in result[name]] for name in ("recovered", "continued"))
    return (
        f"from the death of a rank to a further step {span(recovered, '.0f')} s; from a new start's command "
        f"{span(continued, '.0f')} s; the first start {result['first_start_s']:.0f} s"
    )


def journal(result: Result) -> str:
    run = result["in_a_run"]
    return (
        f"a million tokens: {result['write_s_per_million']:.2f} s to write, each wave on the disk before it counts "
        f"({result['write_cpu_s_per_million']:.2f} CPU s), {result['read_s_per_million']:.2f} s to read back; "
        f"{result['bytes_per_token']:.1f} bytes a token; of a run's steps of {run['tokens_a_step']:,.0f} tokens in "
        f"{run['step_s']:.1f} s, {run['share']:.2%} (limit 1%)"
    )


def sample_store(result: Result) -> str:
    rates = "; ".join(
        f"{name}: {each['write']:.2f} GB/s written, {each['read']:.2f} read and summed up"
        for name, each in result["rates"].items()
    )
    return f"{result['blocks']} blocks of {result['bytes'] / 2**20:.0f} MiB: {rates}"


def start(result: Result) -> str:
    best = min(result["runs"], key=lambda run: run["cpu_s"])
    largest = sorted(best["processes"].items(), key=lambda item: -item[1]["cpu_s"])[:5]
    parts = ", ".join(f"{name} {row['cpu_s']:.1f}" for name, row in largest)
    ready, spent = ([run[key] for run in result["runs"]] for key in ("ready_s", "cpu_s"))
    return f"ready after {span(ready, '.1f')} s, {span(spent, '.1f')} CPU seconds, of them {parts}"


def driver_overhead(result: Result) -> str:
    outside = {name: each["outside_waits_s"] for name, each in result["results"].items()}
    shares = [each["cpu_s"] / result["real_step_s"] for each in result["results"].values()]
    each = ", ".join(f"{seconds * 1e3:.1f} ms ({name})" for name, seconds in outside.items())
    growth = result["growth"]["outside_waits_s"]
    return (
        f"{span(shares, '.1%')} of a step as CPU time; outside of waits, by samples: {each}; x{growth:.2f} from few to many "
        "samples in steps of the same length"
    )


def deterministic(result: Result) -> str:
    slower, cpu, equal = result["slower"], result["more_cpu"], result["equal_samples"]
    return (
        f"{equal['deterministic']} of {result['samples']} samples equal in every turn ({equal['default']} by default), at "
        f"{slower['median']:.2f} of the seconds ({slower['lowest']:.2f} to {slower['highest']:.2f}) and "
        f"{cpu['median']:.2f} of the CPU seconds ({cpu['lowest']:.2f} to {cpu['highest']:.2f})"
    )


def reward_model(result: Result) -> str:
    styles = ", ".join(f"{each['accuracy']:.2f} ({name})" for name, each in result["by_style"].items())
    return (
        f"held-out pairs the right way round: {result['before']:.2f} before, {result['after']:.2f} after, in "
        f"{result['seconds']:.0f} s. In transformers: {styles}"
    )


def ppo_reward_model(result: Result) -> str:
    score, held_out = result["score"], list(result["held_out_accuracy"].values())
    return (
        f"score {score['before']:.2f} to {score['after']:.2f}; right answers, which nothing rewards, {held_out[0]:.2f} to "
        f"{held_out[-1]:.2f}"
    )


def peers_trl(result: Result) -> str:
    def rates(form: str) -> str:
        return f"{form} {span((one['tokens_per_s'] for one in result['steps']['forms'][form]), ',.0f')}"

    found = [", ".join(map(rates, result["steps"]["forms"]))]
    over = ", ".join(f"{form} {ratio:.2f}" for form, ratio in result["steps"]["ratios"].items())
    found.append(f"over TRL's fastest of the same dtype: {over}")
    for form, some in result.get("quickstart", {}).items():
        seconds, start_s = (span((one[key] for one in some), ".1f") for key in ("seconds", "start_s"))
        found.append(f"quickstart to 0.9, {form}: {seconds} s after {start_s} s of start")
    loads = [one["load"] for some in result["steps"]["forms"].values() for one in some]
    return f"tokens/s of whole steps: {'; '.join(found)}. Load after each run {span(loads, '.1f')}"


def peers_algorithms(result: Result) -> str:
    rows, batch = result["rows"], result["batch"]
    ratios = [row["verl_s"] / row["megarl_s"] for row in rows]
    apart = sum(row["factor"] != 1 for row in rows)
    return (
        f"{len(rows)} advantages, losses (with gradients) and KLs of {batch['samples']} samples, {batch['trained']:,} trained "
        f"tokens: equal to {max(row['error'] for row in rows):.1g} of the largest number, {apart} of them by a known factor; "
        f"verl's seconds on padded tensors over megarl's: {statistics.median(ratios):.1f} (median), {span(ratios, '.1f')}. "
        f"{len(result['differences'])} differences on purpose, with their reasons, are in the file"
    )


def agent_load(result: Result) -> str:
    said = []
    for stub in result["stubs"]:
        bare = stub["ways"]["bare"]
        parts = []
        for name, way in stub["ways"].items():
            if name == "bare":
                continue
            share = f"{name} {way['turns_per_s'] / bare['turns_per_s']:.0%}"
            added = f", {way['turn_ms'] - bare['turn_ms']:.2f} ms added to a turn" if "turn_ms" in way else ""
            parts.append(f"{share}{added}")
        after = f"after {stub['answers_after_s']:g} s" if stub["answers_after_s"] else "at once"
        said.append(f"answers {after}: {bare['turns_per_s']:.0f} turns/s, {'; '.join(parts)}")
    most = max(way["peak_mib"] for stub in result["stubs"] for way in stub["ways"].values())
    return (
        f"{result['episodes']} episodes of {result['turns']} turns at once. {'. '.join(said)}. {most:.0f} MiB at most"
    )


def sandbox(result: Result) -> str:
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


def suite(result: Result) -> str:
    before_s, after_s = result["work_s"]
    longest = ", ".join(f"{name.removeprefix('tests/')} {cpu_s}" for name, _, cpu_s in result["longest"][:5])
    return (
        f"{result['passed']:,} tests (and {result['failed']} that passed only alone) of {result['num_files']} files in "
        f"{result['seconds'] / 60:.1f} minutes, {result['cpu_s']:,} processor seconds; most by {longest}; a fixed piece of work "
        f"on all cores took {before_s:.2f} s before and {after_s:.2f} s after"
    )


def agents(result: Result) -> str:
    said = []
    for game in dict.fromkeys(run["game"] for run in result["runs"]):
        each = "; ".join(
            f"seed {run['seed']} {run['before']:.3f} to {run['after']:.3f}, SFT {run['sft_s']:.0f} s, GRPO {run['grpo_s']:.0f} s"
            for run in result["runs"]
            if run["game"] == game
        )
        said.append(f"{game}: {each}")
    return f"success held out: {'. '.join(said)}"


def cpu_step(result: Result) -> str:
    run, rates = result["run"], result["rates"]
    said = ", ".join(
        f"{row['part']} {row['s']:.2f}" + (f" ({row['of_bound']:.0%} of its bound, {row['by']})" if "by" in row else "")
        for row in result["rows"]
    )
    generated = ", ".join(f"{side} {rate:,.0f}" for side, rate in result["generation"].items())
    return (
        f"seconds for 1,000 response tokens, {run['step'] / run['tokens'] * 1000:.2f} in all: {said}. Matmul "
        f"{rates['flops_s'] / 1e9:.0f} GFLOP/s, memory {rates['bytes_s'] / 1e9:.1f} GB/s. Generated, tokens/s: {generated}"
    )
