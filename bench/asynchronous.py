"""What it brings that servers generate while the ranks train, and that a step need not wait for its longest answer.

    python -m bench.asynchronous            # --rows NAME ...: these beside their baselines; --turns N; --quick
    python -m bench.asynchronous --learn    # held-out accuracy of the quickstart's task instead, on three seeds

Real runs of `megarl train`: one SGLang server on a core, one Megatron rank on another. Each prompt's rows bound its response
by a length drawn once (log-normal, sigma 1), and the model never ends a response by itself, so that all rows see the same
prompts, the same tokens and the same number of optimizer steps; that they did is checked. Rows of a kind run in turns, and
ratios are of the same turn: a machine that slows down meanwhile favours nobody.

Rows `split` have a server beside the rank, and a model for which both take about as long. In rows `colocated` they take
turns, as on devices that they share; what a step loses there is its longest answers, which run alone at last. A GPU makes few
tokens hardly faster than many; so that this core does, too, the model is small and a step has few, long answers.

Everything from the first step's beginning to the last one's end counts, also the first step, which no asynchronous run can
overlap, and the last, which waits for all that is left. Idle shares are of the steps between the first and the last. Ranks are
busy while they compute log-probs or learn.

Exit code 0 only where the tokens are the same and the targets are reached.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from bench.support.measure import write
from bench.support.quickstart import ROOT, accuracy, call, metrics, train, warm_start
from tools.make_arithmetic import make_arithmetic
from tools.make_tiny_model import END, make_tiny_model, make_tokenizer

SIGMA = 1.0  # of the logarithm of responses' lengths
SPLIT, COLOCATED = "split, synchronous", "colocated, synchronous"
KEPT = ["rollout.in_flight=in_place", "rollout.keep_kv=true"]
ALONE = ["rollout.offload=[kv_cache]"]


def _stale(versions: int, *words: str) -> list[str]:
    return [f"rollout.max_staleness={versions}", *words]


ROWS: dict[str, list[str]] = {
    SPLIT: [],
    "split, staleness 1, in place, KV kept": _stale(1, *KEPT),
    "split, staleness 2, finish": _stale(2, "rollout.in_flight=finish"),
    "split, staleness 2, abort": _stale(2, "rollout.in_flight=abort"),
    "split, staleness 2, in place": _stale(2, "rollout.in_flight=in_place"),
    "split, staleness 2, in place, KV kept": _stale(2, *KEPT),
    "split, staleness 4, in place, KV kept": _stale(4, *KEPT),
    COLOCATED: ALONE,
    "colocated, oversample 1.25, staleness 1": [*ALONE, *_stale(1, "rollout.oversample=1.25")],
    "colocated, oversample 1.5, staleness 2": [*ALONE, *_stale(2, "rollout.oversample=1.5")],
    "colocated, oversample 2, staleness 4": [*ALONE, *_stale(4, "rollout.oversample=2.0")],
}
TARGETS = {"split": 1.5, "colocated": 1.2}
MOST_IDLE = 0.1  # of the servers, in the best asynchronous row
PHASES = ("rollout", "logprobs", "advantages", "update", "sync")
SEEDS = (1, 2, 3)
LEARN = _stale(2, *KEPT)


@dataclass(frozen=True)
class Size:
    """Of the runs. prompts: of a step. hidden, layers: of the model. median, longest: tokens of a response."""

    steps: int
    prompts: int
    samples: int
    hidden: int
    layers: int
    median: int
    longest: int


# By kind of rows, as their names begin.
FULL = {"split": Size(16, 32, 2, 320, 2, 32, 400), "colocated": Size(16, 8, 2, 96, 2, 96, 1200)}
QUICK = dict.fromkeys(FULL, Size(3, 8, 2, 64, 1, 32, 400))


def luck(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    """A reward that costs nothing and differs within a group."""
    return (sum(map(ord, response)) % 7) / 6


def make_model(folder: Path, size: Size) -> None:
    """A random model which never ends a response: one channel of its residual stream tells the head so."""
    make_tiny_model(folder, hidden_size=size.hidden, layers=size.layers, context=2 * size.longest)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    head = embedding.clone()
    embedding[:, 0], head[:, 0] = 1.0, 0.0
    head[make_tokenizer().convert_tokens_to_ids(END), 0] = -10.0
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))


def make_data(folder: Path, size: Size) -> Path:
    """Prompts for all steps, each with the length of its responses."""
    rows = size.prompts * size.steps
    make_arithmetic(folder, num_train=rows, num_eval=1, num_sft=1)
    drawn = np.random.default_rng(0).lognormal(np.log(size.median), SIGMA, rows)
    lengths = np.clip(np.rint(drawn), 1, size.longest).astype(int)
    lines = (folder / "train.jsonl").read_text().splitlines()
    bounded = [
        json.dumps({**json.loads(line), "max_response_tokens": int(length)})
        for line, length in zip(lines, lengths, strict=True)
    ]
    path = folder / "bounded.jsonl"
    path.write_text("\n".join(bounded) + "\n")
    return path


def recipe_of(folder: Path, name: str, size: Size) -> dict[str, Any]:
    """The recipe that all rows share."""
    return {
        "run": {"dir": str(folder / "runs"), "name": name},
        "cluster": {"platform": "cpu"},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "data" / "bounded.jsonl"), "max_prompt_tokens": 32},
        "rollout": {
            "prompts_per_step": size.prompts,
            "samples_per_prompt": size.samples,
            "max_response_tokens": size.longest,
            # As many as a step has: what comes ahead of it takes the places of those that are done, not of those that are due.
            "max_running_requests": size.prompts * size.samples,
            "concurrency": size.prompts * size.samples,
            "kv_tokens": size.prompts * size.samples * size.longest,
        },
        "reward": {"fn": "bench.asynchronous:luck"},
        "algorithm": {"kl_coef": 0.0, "correction": {}},
        "actor": {
            "mini_batch_samples": size.prompts * size.samples,
            "micro_batch_tokens": 2048,
            "optimizer": {"lr": 1e-6},
        },
        "report": {"tensorboard": False, "samples": 0},
        "train": {"steps": size.steps},
    }


def run(folder: Path, name: str, size: Size) -> dict[str, Any]:
    """One run of a row: what its metrics say."""
    recipe = folder / "recipe.json"  # JSON is YAML
    label = "".join(letter if letter.isalnum() else "-" for letter in name)
    recipe.write_text(json.dumps(recipe_of(folder, label, size)))
    shutil.rmtree(folder / "runs" / label, ignore_errors=True)
    call("-m", "megarl", "train", str(recipe), *ROWS[name])
    return digest([row for row in metrics(folder / "runs" / label) if row["step"]], size)


def digest(rows: Sequence[dict[str, Any]], size: Size) -> dict[str, Any]:
    """What a row's table shows, of the rows of its metrics.jsonl."""
    samples = size.prompts * size.samples
    seconds = sum(row["perf/step_s"] for row in rows)
    tokens = round(sum(row["rollout/response_len_mean"] * samples for row in rows))
    between = rows[1:-1] or rows
    between_s = sum(row["perf/step_s"] for row in between)

    def share(key: str) -> float:
        return float(sum(row[key] * row["perf/step_s"] for row in between) / between_s)

    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "steps": len(rows),
        "phases": {phase: sum(row.get(f"perf/{phase}_s", 0.0) for row in rows) / len(rows) for phase in PHASES},
        "servers_idle": share("perf/servers_idle"),
        "ranks_idle": share("perf/ranks_idle"),
        "staleness_mean": statistics.mean(row.get("rollout/staleness_mean", 0.0) for row in rows),
        "staleness_max": max(row.get("rollout/staleness_max", 0.0) for row in rows),
        "carried": statistics.mean(row.get("rollout/carried_tokens", 0.0) for row in rows),
    }


def kind(name: str) -> str:
    """Of a row: a key of FULL."""
    return name.partition(",")[0]


def baseline(name: str) -> str:
    """Of the row, the synchronous one of its kind."""
    return SPLIT if kind(name) == "split" else COLOCATED


def compare(turns: dict[str, list[dict[str, Any]]]) -> dict[str, list[float]]:
    """Of each row, its tokens a second over its baseline's, turn by turn."""
    return {
        name: [
            one["tokens_per_s"] / other["tokens_per_s"] for one, other in zip(found, turns[baseline(name)], strict=True)
        ]
        for name, found in turns.items()
    }


def same_work(turns: dict[str, list[dict[str, Any]]]) -> bool:
    """Whether all rows of a kind trained on the same tokens, in as many steps."""
    kinds: dict[str, set[tuple[int, int]]] = {}
    for name, found in turns.items():
        kinds.setdefault(baseline(name), set()).update((one["tokens"], one["steps"]) for one in found)
    return all(len(work) == 1 for work in kinds.values())


def show(turns: dict[str, list[dict[str, Any]]], ratios: dict[str, list[float]]) -> None:
    """The table: medians over the turns."""
    table = Table(title=f"medians of {len(next(iter(turns.values())))} turns")
    head = ("row", "tokens/s", "ratio", "s a step", *PHASES, "idle servers", "ranks", "staleness", "carried")
    for column in head:
        table.add_column(column, justify="left" if column == "row" else "right")
    for name, found in turns.items():

        def median(key: str, found: list[dict[str, Any]] = found) -> float:
            return float(statistics.median(one[key] for one in found))

        phases = [statistics.median(one["phases"][phase] for one in found) for phase in PHASES]
        table.add_row(
            *(name, f"{median('tokens_per_s'):,.0f}", f"{statistics.median(ratios[name]):.2f}"),
            f"{median('seconds') / found[0]['steps']:.2f}",
            *(f"{seconds:.2f}" for seconds in phases),
            *(f"{median('servers_idle'):.1%}", f"{median('ranks_idle'):.1%}"),
            *(f"{median('staleness_mean'):.2f} ({median('staleness_max'):.0f})", f"{median('carried'):.1%}"),
        )
    Console(width=200).print(table)


def reached(turns: dict[str, list[dict[str, Any]]], ratios: dict[str, list[float]]) -> dict[str, bool]:
    """Of each target whose rows ran, whether a row reaches it; idle servers are asked of those that are fast enough.

    A row that works far ahead has idle servers at last: all that the run will need is there some steps before its end.
    """
    found = {}
    for each, target in TARGETS.items():
        rows = {name: statistics.median(some) for name, some in ratios.items() if kind(name) == each}
        rows.pop(baseline(each), None)
        if rows:
            fast = [name for name, rate in rows.items() if rate >= target]
            found[f"{each}: {target}x"] = bool(fast)
            if each == "split":
                idle = [statistics.median(one["servers_idle"] for one in turns[name]) for name in fast or rows]
                found[f"idle servers under {MOST_IDLE:.0%}"] = min(idle) < MOST_IDLE
    return found


def measure(names: Sequence[str], sizes: Mapping[str, Size], turns: int) -> dict[str, Any]:
    """Run the rows in turns."""
    chosen = [name for name in ROWS if name in names or name in {baseline(each) for each in names}]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    loads = []
    # Ray's sockets have long names.
    with tempfile.TemporaryDirectory(prefix="ba-", dir="/tmp") as temporary:
        folders = {kind(name): Path(temporary) / kind(name) for name in chosen}
        for each, folder in folders.items():
            make_model(folder / "model", sizes[each])
            (folder / "data").mkdir()
            make_data(folder / "data", sizes[each])
        for turn in range(turns):
            for name in chosen if turn % 2 == 0 else reversed(chosen):
                loads.append(os.getloadavg()[0])
                one = run(folders[kind(name)], name, sizes[kind(name)])
                found[name].append(one)
                print(f"turn {turn + 1}, {name}: {one['tokens_per_s']:,.0f} tokens/s, load {loads[-1]:.1f}", flush=True)
    return {"turns": found, "ratios": compare(found), "loads": loads, "same_work": same_work(found)}


def learn(folder: Path, steps: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Held-out accuracy after GRPO from the same warm start, synchronous and asynchronous, by seed."""
    sides: dict[str, list[str]] = {"synchronous": [], "staleness 2": LEARN}
    found: dict[str, dict[int, float]] = {name: {} for name in sides}
    for seed in seeds:
        here = folder / f"seed-{seed}"
        if not (here / "sft" / "hf" / "config.json").exists():
            warm_start(seed, here)
        for name, words in sides.items():
            train("quickstart", name.replace(" ", "-"), seed, here, [f"train.steps={steps}", *words])
            curve = accuracy(metrics(here / name.replace(" ", "-")))
            found[name][seed] = curve[max(curve)]
            print(f"seed {seed}, {name}: {curve[min(curve)]:.3f} -> {found[name][seed]:.3f}", flush=True)
    return {"steps": steps, "accuracy": found, "within": within(found)}


def within(found: dict[str, dict[int, float]]) -> bool:
    """Whether the asynchronous mean lies within the spread of the synchronous seeds, or above."""
    return statistics.mean(found["staleness 2"].values()) >= min(found["synchronous"].values())


def main(
    *,
    rows: Sequence[str] = tuple(ROWS),
    turns: int = 2,
    quick: bool = False,
    out: Path | None = None,
) -> None:
    """Measure and show; writes asynchronous.json. Exits where the rows did other work, or a target is missed."""
    sizes = QUICK if quick else FULL
    result = measure(rows, sizes, 1 if quick else turns)
    show(result["turns"], result["ratios"])
    result["targets"] = reached(result["turns"], result["ratios"])
    print(f"same tokens and steps: {result['same_work']}; {result['targets']}")
    write("asynchronous", {**result, "sizes": {each: vars(size) for each, size in sizes.items()}, "sigma": SIGMA}, out)
    if not result["same_work"] or not (quick or all(result["targets"].values())):
        sys.exit(1)


def main_learn(steps: int, seeds: Sequence[int], out: Path | None = None) -> None:
    """Learn and show; writes asynchronous_learn.json. Exits where the asynchronous side learned less."""
    result = learn(ROOT / ".cache" / "asynchronous", steps, seeds)
    table = Table(title=f"held-out accuracy after {steps} steps of GRPO")
    for column in ("", *(f"seed {seed}" for seed in seeds), "mean"):
        table.add_column(column)
    for name, by_seed in result["accuracy"].items():
        mean = statistics.mean(by_seed.values())
        table.add_row(name, *(f"{by_seed[seed]:.3f}" for seed in seeds), f"{mean:.3f}")
    Console().print(table, f"within the synchronous seeds' spread: {result['within']}")
    write("asynchronous_learn", result, out)
    sys.exit(0 if result["within"] else 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="sizes that prove nothing")
    parser.add_argument("--learn", action="store_true", help="accuracies instead of speeds")
    parser.add_argument("--steps", type=int, default=30, help="of the runs that learn")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options = parser.parse_args()
    if options.learn:
        main_learn(options.steps, options.seeds)
    else:
        main(rows=options.rows, turns=options.turns, quick=options.quick)
