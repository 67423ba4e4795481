"""megarl beside TRL's GRPOTrainer: the same model, prompts, reward and number of samples, on this machine's CPU.

    python -m bench.peers_trl                # --turns N; --only steps|quickstart; --dtype float32

TRL's pinned release gets a virtual environment of its own in .cache/, made by pip. (b) Whole steps of a random 12M model that
ends a response with the same probability after each token, so that lengths are geometric: mean 300, at most 768; 64 samples.
Lengths are drawn by the model, on either side by its own sampler; tokens a second is of whole steps, and the parts are seconds
for a thousand response tokens. Runs alternate. megarl runs with its defaults; of TRL's forms the fastest of the same dtype
counts. (a) The quickstart's task from the same warm start until 0.9 of its 200 held-out prompts are answered rightly, greedily
decoded every fifth step on both sides: seconds with and without the start, and tokens.

Exit code 0 only where prompts agree token for token, all samples were made, (b) is 2.5 times as fast, and (a) no slower.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.support.measure import RESULTS, write
from bench.support.peers import Size, make_model, make_prompts
from bench.support.quickstart import ROOT, metrics, warm_start
from megarl.core.platform import get_platform
from megarl.data.chat import load_tokenizer
from megarl.data.prompts import load_prompts
from megarl.recipe.schema import Data

PINS = ("trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0", "torch==2.13.0")
CACHE = ROOT / ".cache"
TARGET = 2.5
ENOUGH = 0.9
EVERY, QUICKSTART_STEPS = 5, 10
# Eight of a step's samples in a forward pass: the widest pads least there.
SPLIT = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "learning_rate": 1e-6, "beta": 0.0}
BATCHING = {"use_transformers_continuous_batching": True}
TRL_FORMS: dict[str, dict[str, Any]] = {
    "TRL, float32": {"bf16": False},
    "TRL, float32, continuous batching": {"bf16": False, **BATCHING},
    "TRL, bf16, continuous batching": {"bf16": True, **BATCHING},
}
MEGARL_FORMS = {"megarl, float32": "float32", "megarl, bfloat16": "bfloat16"}
# Of the forms; a CPU without bfloat16 products takes many times as long for the second.
DTYPES = {"float32": "float32", "bfloat16": "b(float|f)16"}
# The quickstart's own: two optimizer steps a rollout of 128 samples, a KL in the loss.
QUICKSTART = {
    **{"per_device_train_batch_size": 64, "steps_per_generation": 2, "learning_rate": 5e-5, "beta": 0.001},
    **{"epsilon": 0.2, "epsilon_high": 0.28, "bf16": False},
}
PARTS = ("generate", "logprobs", "update", "rest")


def environment() -> dict[str, str]:
    """Both sides choose their threads, and how these wait, themselves; TRL gets what megarl sets for its ranks of memory."""
    variables = {**os.environ, **get_platform("cpu").env, "HF_HUB_OFFLINE": "1"}
    # TRL is a single process, whose threads lose by not spinning.
    return {name: value for name, value in variables.items() if not name.startswith("OMP_")}


def trl_python() -> Path:
    """The interpreter of TRL's environment, which is made where it is not there."""
    folder = CACHE / f"trl-{hashlib.sha256(' '.join(PINS).encode()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PINS], check=True)
        (folder / "made").touch()
    return python


def call(command: list[str]) -> None:
    """Run it in the repository's root. Exits with its output where it fails."""
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} exited with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def run_trl(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """A run of TRL's side: what it wrote."""
    asked, found = folder / "settings.json", folder / "found.json"
    asked.write_text(json.dumps({**settings, "out": str(folder / "trl")}))
    call([str(trl_python()), "bench/support/trl_step.py", str(asked), str(found)])
    result: dict[str, Any] = json.loads(found.read_text())
    return result


def trl_steps(folder: Path, size: Size, form: str) -> dict[str, Any]:
    """(b) of TRL."""
    found = run_trl(
        folder,
        {
            **{"model": str(folder / "model"), "train": str(folder / "data" / "train.jsonl"), "held_out": None},
            **{"samples": size.samples, "longest": size.longest, "steps": size.steps},
            "options": {**SPLIT, "shuffle_dataset": False, **TRL_FORMS[form]},
        },
    )
    parts = {part: sum(step.get(part, 0.0) for step in found["steps"]) for part in PARTS}
    tokens, samples = (sum(step[name] for step in found["steps"]) for name in ("tokens", "samples"))
    return _digest(tokens, samples, sum(step["whole"] for step in found["steps"]), parts) | {"prompt": found["prompt"]}


def _digest(tokens: float, samples: float, seconds: float, parts: dict[str, float]) -> dict[str, Any]:
    return {
        "tokens": round(tokens),
        "samples": round(samples),
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "s_for_1000": {part: value / tokens * 1000 for part, value in parts.items()},
        "load": os.getloadavg()[0],
    }


def recipe(folder: Path, size: Size, dtype: str) -> dict[str, Any]:
    """Of megarl for (b): what the comparison fixes, and what has no default."""
    return {
        "run": {"dir": str(folder / "runs"), "name": dtype},
        "cluster": {"platform": "cpu"},
        "model": {"path": str(folder / "model"), "dtype": dtype},
        "data": {"train": str(folder / "data" / "train.jsonl"), "max_prompt_tokens": 32, "shuffle": False},
        "rollout": {
            "prompts_per_step": size.prompts,
            "samples_per_prompt": size.samples,
            "max_response_tokens": size.longest,
        },
        "reward": {"fn": "bench.support.peers:reward"},
        "actor": {"optimizer": {"lr": 1e-6}},
        "train": {"steps": size.steps},
    }


def megarl_steps(folder: Path, size: Size, form: str) -> dict[str, Any]:
    """(b) of megarl."""
    dtype = MEGARL_FORMS[form]
    shutil.rmtree(folder / "runs" / dtype, ignore_errors=True)
    file = folder / "recipe.json"  # JSON is YAML
    file.write_text(json.dumps(recipe(folder, size, dtype)))
    call([sys.executable, "-m", "megarl", "train", str(file)])
    rows = [row for row in metrics(folder / "runs" / dtype) if row["step"]]
    samples = size.prompts * size.samples
    whole = sum(row["perf/step_s"] for row in rows)
    keys = {"generate": "rollout", "logprobs": "logprobs", "update": "update"}
    parts = {part: sum(row.get(f"perf/{key}_s", 0.0) for row in rows) for part, key in keys.items()}
    parts["rest"] = whole - sum(parts.values())
    return _digest(sum(row["rollout/response_len_mean"] * samples for row in rows), samples * len(rows), whole, parts)


def steps(turns: int, size: Size, dtypes: Sequence[str]) -> dict[str, Any]:
    """(b), in turns."""
    every = dict.fromkeys(TRL_FORMS, trl_steps) | dict.fromkeys(MEGARL_FORMS, megarl_steps)
    sides = {form: run for form, run in every.items() if any(re.search(DTYPES[dtype], form) for dtype in dtypes)}
    found: dict[str, list[dict[str, Any]]] = {form: [] for form in sides}
    with tempfile.TemporaryDirectory(prefix="bp-", dir="/tmp") as name:  # Ray's sockets have long names
        folder = Path(name)
        parameters = make_model(folder / "model", size)
        train = make_prompts(folder / "data", size)
        prompts = load_prompts(train, load_tokenizer(folder / "model"), Data(train=train, max_prompt_tokens=32))
        first = prompts.prompts[0].token_ids.tolist()
        for turn in range(turns):
            for form in sides if turn % 2 == 0 else reversed(sides):
                found[form].append(sides[form](folder, size, form))
                print(f"turn {turn + 1}, {form}: {found[form][-1]['tokens_per_s']:,.0f} tokens/s", flush=True)
    same = all(one.pop("prompt", first) == first for some in found.values() for one in some)
    return {"parameters": parameters, "size": asdict(size), "same_prompt": same, "forms": found}


def ratios(found: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Of each form of megarl, its tokens a second over those of TRL's fastest form of the same dtype; medians of turns."""
    rates = {form: statistics.median(one["tokens_per_s"] for one in some) for form, some in found.items()}
    return {
        form: rates[form]
        / max(rate for name, rate in rates.items() if name in TRL_FORMS and re.search(DTYPES[dtype], name))
        for form, dtype in MEGARL_FORMS.items()
        if form in rates
    }


def megarl_quickstart(folder: Path) -> dict[str, Any]:
    """(a) of megarl: until enough held-out prompts are answered rightly; the run is not waited for after that."""
    run = folder / "megarl"
    shutil.rmtree(run, ignore_errors=True)
    file = run / "metrics.jsonl"
    words = [
        *(f"run.dir={folder}", "run.name=megarl", f"model.path={folder}/sft/hf", f"train.steps={QUICKSTART_STEPS}"),
        *(f"data.train={folder}/data/train.jsonl", f"data.eval={folder}/data/eval.jsonl", f"eval.every={EVERY}"),
    ]
    began = time.monotonic()
    command = [sys.executable, "-m", "megarl", "train", "recipes/quickstart.yaml", *words]
    with (folder / "megarl.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log)
        start_s = None
        while process.poll() is None:
            # The first line comes when servers and ranks are up, have the same weights, and have been asked once.
            if start_s is None and file.exists() and file.stat().st_size:
                start_s = time.monotonic() - began
            time.sleep(0.05)
    if process.returncode or start_s is None:
        sys.exit(f"megarl's quickstart exited with {process.returncode}: see {folder}/megarl.log")
    seconds, tokens, accuracy = 0.0, 0.0, {}
    for row in metrics(run):
        seconds += row.get("perf/step_s", 0.0) if row["step"] else 0.0
        tokens += row.get("rollout/response_len_mean", 0.0) * 128
        if "eval/accuracy" in row:
            accuracy[row["step"]] = row["eval/accuracy"]
            if row["eval/accuracy"] >= ENOUGH:
                break
    return {"start_s": start_s, "seconds": seconds, "tokens": round(tokens), "accuracy": accuracy}


def trl_quickstart(folder: Path) -> dict[str, Any]:
    """(a) of TRL; a step of megarl's is two of its optimizer's."""
    found = run_trl(
        folder,
        {
            **{"model": f"{folder}/sft/hf", "train": f"{folder}/data/train.jsonl"},
            **{"held_out": f"{folder}/data/eval.jsonl", "every": 2 * EVERY, "samples": 8, "longest": 48},
            **{"steps": 2 * QUICKSTART_STEPS, "options": QUICKSTART},
        },
    )
    before, *_, last = found["accuracy"]
    return {
        "start_s": found["start_s"] + before["seconds"],
        "seconds": last["seconds"] - before["seconds"],
        "tokens": round(sum(step["tokens"] for step in found["steps"])),
        "accuracy": {one["step"] // 2: one["accuracy"] for one in found["accuracy"]},
    }


def quickstart(turns: int) -> dict[str, list[dict[str, Any]]]:
    """(a), in turns."""
    folder = CACHE / "peers" / "quickstart"
    if not (folder / "sft" / "hf" / "config.json").exists():
        warm_start(1, folder)
    # Continuous batching takes TRL's generation of so short answers several times as long.
    sides = {"megarl": megarl_quickstart, "TRL": trl_quickstart}
    found: dict[str, list[dict[str, Any]]] = {form: [] for form in sides}
    for turn in range(turns):
        for form in sides if turn % 2 == 0 else reversed(sides):
            found[form].append({**sides[form](folder), "load": os.getloadavg()[0]})
    return found


def middle(some: list[dict[str, Any]]) -> dict[str, float]:
    """Of a side's turns of (a), the medians of seconds: after the start, and with it."""
    return {
        "start_s": statistics.median(one["start_s"] for one in some),
        "seconds": statistics.median(one["seconds"] for one in some),
        "whole_s": statistics.median(one["start_s"] + one["seconds"] for one in some),
    }


def no_slower(found: dict[str, list[dict[str, Any]]]) -> dict[str, bool]:
    """Whether megarl gets there each time, and needs no more seconds than TRL: start apart, and with it; medians of turns."""
    mine, other = middle(found["megarl"]), middle(found["TRL"])
    there = all(max(one["accuracy"].values()) >= ENOUGH for one in found["megarl"])
    return {
        name: there and mine[key] <= other[key] for name, key in (("apart", "seconds"), ("with the start", "whole_s"))
    }


def show(result: dict[str, Any]) -> None:
    """The tables."""
    if "steps" in result:
        table = Table(title="(b) whole steps; seconds for 1,000 response tokens by part")
        for column in ("form", "tokens/s", *PARTS, "mean length"):
            table.add_column(column, justify="left" if column == "form" else "right")
        for form, some in result["steps"]["forms"].items():
            middle = sorted(some, key=lambda one: one["tokens_per_s"])[len(some) // 2]
            parts = [f"{middle['s_for_1000'].get(part, 0.0):.2f}" for part in PARTS]
            table.add_row(form, f"{middle['tokens_per_s']:,.0f}", *parts, f"{middle['tokens'] / middle['samples']:.0f}")
        Console(width=120).print(table, f"over TRL's fastest form: {result['steps']['ratios']}")
    if "quickstart" in result:
        table = Table(title=f"(a) the quickstart until {ENOUGH} of the held-out prompts")
        for column in ("form", "start s", "seconds", "tokens", "accuracy by step"):
            table.add_column(column)
        for form, some in result["quickstart"].items():
            for one in some:
                seconds = f"{one['start_s']:.1f}", f"{one['seconds']:.1f}"
                table.add_row(form, *seconds, f"{one['tokens']:,}", str(one["accuracy"]))
        Console(width=160).print(table, f"no slower, by medians: {result['quickstart_no_slower']}")


def main(
    only: str | None, turns: int, size: Size, out: Path | None = None, dtypes: Sequence[str] = tuple(DTYPES)
) -> None:
    """Measure and show; writes peers_trl.json. Exits where sides did other work, or a target is missed."""
    print(f"TRL's environment: {', '.join(PINS)}")
    trl_python()
    before = (out or RESULTS) / "peers_trl.json"
    known = json.loads(before.read_text()) if only and before.exists() else {}
    result: dict[str, Any] = {**known, "pins": PINS, "target": TARGET}
    good = True
    if only != "quickstart":
        result["steps"] = steps(turns, size, dtypes)
        result["steps"]["ratios"] = ratios(result["steps"]["forms"])
        wanted = size.prompts * size.samples * size.steps
        whole = all(one["samples"] == wanted for some in result["steps"]["forms"].values() for one in some)
        good = whole and result["steps"]["same_prompt"] and min(result["steps"]["ratios"].values()) >= TARGET
    if only != "steps":
        result["quickstart"] = quickstart(turns)
        result["quickstart_no_slower"] = no_slower(result["quickstart"])
        good = good and all(result["quickstart_no_slower"].values())
    show(result)
    write("peers_trl", result, out)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["steps", "quickstart"], help="one part; of the other the result stays")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2, help="of a run of (b)")
    parser.add_argument("--dtype", choices=list(DTYPES), help="one alone, of (b)")
    options = parser.parse_args()
    chosen = tuple(DTYPES) if options.dtype is None else (options.dtype,)
    main(options.only, options.turns, Size(steps=options.steps), dtypes=chosen)
