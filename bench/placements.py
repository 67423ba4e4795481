"""The four named placements, an explicit one, and one where everything is offloaded between its turns: do they train the same?

    python -m bench.placements                 # --only NAME ...: these anew, the others as they ran before

PPO with a critic and a reference on the quickstart's task, some steps for each placement on 4 ranks, from a policy that has
already learned some of it (after its warm start, a little of GRPO), so that rewards differ. Named placements are searched for
(`placement.name`) with the rates of `bench/results/plan_vs_measured.yaml`. So that all see the same rollouts, each sample has
its own random numbers (`rollout.deterministic`). Differences of losses are to the first placement, relative where a
loss is above 1. The last run is the explicit placement again, all roles and servers at rest between their turns: every
metric that is no time and no memory, and every sample, must be equal to the bit. Exit code 0 only where all that holds.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from bench.support.measure import write
from bench.support.quickstart import ROOT, metrics, train, warm_start

FOLDER = ROOT / ".cache" / "placements"
CLUSTER = Path(__file__).parent / "results" / "plan_vs_measured.yaml"
SEED, FIRST_STEPS, STEPS, LIMIT = 1, 3, 6, 1e-5
COMMON = ["algorithm.kl_coef=0.01", "rollout.deterministic=true", "critic.warmup_steps=1", f"train.steps={STEPS}"]
COMMON += ["eval.max_prompts=8", "report.samples=512", "report.tensorboard=false", "cluster.devices=4"]
POOLS = (
    "placement.pools={a: {devices: 2, roles: [actor]}, b: {devices: 1, roles: [critic]}, "
    "c: {devices: 1, roles: [reference]}}"
)
# One request at a time, no prefixes kept: how a server batches, and what it has cached, shows in the last bit of its log-probs.
EXPLICIT = [
    POOLS,
    "rollout.concurrency=1",
    "rollout.server_args=[--disable-radix-cache]",
    "actor.parallel.tp=2",
    "reference.parallel.tp=1",
    "critic.parallel.tp=1",
]
OFFLOAD = [f"{role}.offload=[grads, params, optimizer]" for role in ("actor", "critic")]
OFFLOAD += ["reference.offload=[params]", "rollout.offload=[weights, kv_cache]"]
NAMED = {
    name: [f"placement.name={name}", f"cluster.file={CLUSTER}"]
    for name in ("colocate", "hybrid", "split", "standalone")
}
RUNS = {**NAMED, "explicit": EXPLICIT, "explicit, all at rest": [*EXPLICIT, *OFFLOAD]}
LOSSES = ("actor/loss", "critic/vf_loss", "reward/kl")
# What no placement may change: the rollouts.
SAME = ("reward/mean", "rollout/response_len_mean", "rollout/response_len_max")
BEGUN = "begun"


def folder_of(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")


def layout(run: Path) -> str:
    """Where the run's roles were, by the recipe that it saved."""
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    pools = recipe.get("placement", {}).get("pools") or {"all": {"devices": recipe["cluster"]["devices"]}}
    words = [f"{'+'.join(pool.get('roles', ['all']))} {pool['devices']}" for pool in pools.values()]
    return f"{' | '.join(words)}; servers {recipe['rollout'].get('servers', 1)}"


def far_apart(one: float, other: float) -> float:
    return abs(one - other) / max(1.0, abs(other))


def compare(rows: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    pairs = list(zip(rows, base, strict=True))
    worst = {
        name: max((far_apart(row[name], other[name]) for row, other in pairs if name in other), default=math.nan)
        for name in LOSSES
    }
    same = all(row.get(name) == other.get(name) for row, other in pairs for name in SAME)
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    return {"same_rollouts": same, "losses": worst, "rewards": rewards}


def bits(run: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Everything that a run computed: metrics but times and memory, and its samples."""
    rows = [
        {name: value for name, value in row.items() if not name.startswith(("perf/", "memory/", "time"))}
        for row in metrics(run)
    ]
    return rows, [path.read_text() for path in sorted((run / "samples").glob("step_*.jsonl"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=[*RUNS], default=[*RUNS])
    only = parser.parse_args().only
    if not (FOLDER / "sft" / "hf").exists():
        print(f"warm start: {warm_start(SEED, FOLDER):.0f} s", flush=True)
    if not (FOLDER / BEGUN / "hf").exists():
        begin = [f"train.steps={FIRST_STEPS}", "eval.max_prompts=64"]
        print(f"its beginning: {train('quickstart', BEGUN, SEED, FOLDER, begin):.0f} s", flush=True)
    found: dict[str, Any] = {}
    base: list[dict[str, Any]] = []
    for name, overrides in RUNS.items():
        if name in only:
            words = [*COMMON, *overrides, f"model.path={FOLDER}/{BEGUN}/hf"]
            print(f"{name}: {train('quickstart_ppo', folder_of(name), SEED, FOLDER, words):.0f} s", flush=True)
        rows = metrics(FOLDER / folder_of(name))
        base = base or rows
        found[name] = {"layout": layout(FOLDER / folder_of(name)), **compare(rows, base)}
    awake, rested = (bits(FOLDER / folder_of(name)) for name in ("explicit", "explicit, all at rest"))
    table = Table(title="Differences to the first, over all steps")
    for column in ("placement", "roles and devices", "same rollouts", *LOSSES):
        table.add_column(column)
    for name, each in found.items():
        table.add_row(
            name, each["layout"], str(each["same_rollouts"]), *(f"{each['losses'][loss]:.1e}" for loss in LOSSES)
        )
    Console().print(table, f"awake and at rest equal to the bit: {awake == rested}")
    good = awake == rested and all(
        each["same_rollouts"] and max(each["losses"].values()) <= LIMIT for each in found.values()
    )
    write("placements", {"steps": STEPS, "limit": LIMIT, "bit_equal_at_rest": awake == rested, "runs": found}, None)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
