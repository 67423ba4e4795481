"""Predicted beside measured on this machine: placements of 2 and 4 ranks that really run, and the search's own pick.

    megarl profile --out bench/results/plan_vs_measured.yaml      # on a quiet machine, about a minute
    python -m bench.plan_vs_measured --only dp2 tp2               # measures these; without --only, all, some minutes
    python -m bench.plan_vs_measured --only                       # compares and draws what has been measured so far

The rates come from the profile, which knows neither the model nor the runs; the lengths of the samples are those that each run
met, for they are what it had to do and not how fast it was. The model has random weights: its answers mostly go to the limit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from bench.support.measure import write
from bench.support.quickstart import ROOT, call
from megarl.placement.apply import apply_plan, plan_recipe
from megarl.placement.cluster import Cluster
from megarl.placement.local import run_cluster
from megarl.placement.recipe_plan import predict_recipe
from megarl.placement.workload import read_model, recipe_workload
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe
from megarl.run.past_run import PastRun, read_run

FOLDER = ROOT / ".cache" / "plan_vs_measured"
RESULTS = Path(__file__).parent / "results"
CLUSTER = RESULTS / "plan_vs_measured.yaml"
RECIPE = ROOT / "recipes" / "quickstart.yaml"
STEPS = 6
PICK = "pick"
LIMITS = {"median_error": 0.15, "pick_over_fastest": 1.1}
APART = "placement.pools={one: {devices: 2, roles: [actor]}, two: {devices: 2, roles: [reference]}}"
PLACEMENTS: dict[str, tuple[str, ...]] = {
    "dp2": ("cluster.devices=2",),
    "tp2": ("cluster.devices=2", "actor.parallel.tp=2"),
    "pp2": ("cluster.devices=2", "actor.parallel.pp=2", "actor.micro_batch_tokens=512"),
    "cp2": ("cluster.devices=2", "actor.parallel.cp=2"),
    "dp2, 2 servers": ("cluster.devices=2", "rollout.servers=2"),
    "dp4": ("cluster.devices=4",),
    "tp2 dp2": ("cluster.devices=4", "actor.parallel.tp=2"),
    "pp2 dp2": ("cluster.devices=4", "actor.parallel.pp=2", "actor.micro_batch_tokens=512"),
    "dp2 | reference dp2": ("cluster.devices=4", APART),
}


def overrides(name: str) -> list[str]:
    """What a placement says beside the quickstart's recipe."""
    model, data = FOLDER / "model", FOLDER / "data"
    return [
        *(f"run.dir={FOLDER}", f"run.name={folder_of(name).name}"),
        *(f"model.path={model}", f"data.train={data}/train.jsonl", f"data.eval={data}/eval.jsonl"),
        *("eval.max_prompts=4", f"train.steps={STEPS}", f"cluster.file={CLUSTER}", "report.samples=128"),
        *(picked() if name == PICK else PLACEMENTS[name]),
    ]


def picked() -> list[str]:
    """What the search picks for this machine, as overrides."""
    base = [f"model.path={FOLDER}/model", f"cluster.file={CLUSTER}", "cluster.devices=4"]
    recipe = load_recipe(RECIPE, base, Recipe).recipe
    workload = recipe_workload(recipe, read_model(recipe.model.path), _met_lengths())
    placed = apply_plan(recipe, plan_recipe(recipe, workload, _cluster(recipe)))
    given = {
        "cluster.devices": placed.cluster.devices,
        "rollout.servers": placed.rollout.servers,
        "actor.micro_batch_tokens": placed.actor.micro_batch_tokens,
        "actor.recompute": placed.actor.recompute,
    }
    words = [f"{key}={value}" for key, value in given.items()]
    for role in ("actor", "reference"):
        parallel = getattr(placed, role).parallel
        words += [f"{role}.parallel.{axis}={getattr(parallel, axis)}" for axis in ("tp", "pp", "cp")]
    pools = {
        name: {"devices": pool.devices, "roles": list(pool.roles)} for name, pool in placed.placement.pools.items()
    }
    return [*words, f"placement.pools={json.dumps(pools)}"] if pools else words


def _met_lengths() -> Any:
    """Of the answers of the first placement that ran."""
    return _run(next(iter(PLACEMENTS))).workload.responses


def _cluster(recipe: Recipe) -> Cluster:
    cluster = run_cluster(recipe)
    assert cluster is not None
    return cluster


def _run(name: str) -> PastRun:
    return read_run(folder_of(name))


def folder_of(name: str) -> Path:
    return FOLDER / name.replace(" ", "_").replace(",", "").replace("|", "and")


def prepare() -> None:
    """The tiny model and its task, where they are not there yet."""
    if not (FOLDER / "data").exists():
        call("tools/make_tiny_model.py", "--out", str(FOLDER / "model"), "--seed", "1")
        call("tools/make_arithmetic.py", "--out", str(FOLDER / "data"), "--seed", "1")


def measure(name: str) -> None:
    given = overrides(name)
    shutil.rmtree(folder_of(name), ignore_errors=True)
    print(f"{name}: {call('-m', 'megarl', 'train', str(RECIPE), *given):.0f} s", flush=True)


def lines() -> list[dict[str, Any]]:
    """Every placement that was measured: predicted and measured seconds by phase."""
    found = []
    for name in (*PLACEMENTS, PICK):
        if not (folder_of(name) / "metrics.jsonl").exists():
            continue
        run = _run(name)
        plan = predict_recipe(run.recipe, run.workload, _cluster(run.recipe))
        found.append(
            {
                "placement": name,
                "describes": plan.describe(),
                "predicted_s": plan.step_s,
                "measured_s": run.step_s,
                "error": plan.step_s / run.step_s - 1,
                "predicted": {phase: float(plan.phases[phase]) for phase in run.seconds},
                "measured": dict(run.seconds),
            }
        )
    return found


def summary(found: list[dict[str, Any]]) -> dict[str, float]:
    """Median error of whole steps, and what the best prediction took against the fastest."""
    best = min(found, key=lambda line: line["predicted_s"])
    return {
        "placements": len(found),
        "median_error": statistics.median(abs(line["error"]) for line in found),
        "pick_over_fastest": best["measured_s"] / min(line["measured_s"] for line in found),
    }


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Bars of predicted and measured seconds side by side, by phase."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 5))
    phases = list(found[0]["measured"])
    for side, (kind, hatch) in enumerate((("predicted", "//"), ("measured", None))):
        bottoms = [0.0] * len(found)
        for index, phase in enumerate(phases):
            heights = [line[kind][phase] for line in found]
            places = [place + (side - 0.5) * 0.38 for place in range(len(found))]
            label = phase if side else None
            axes.bar(places, heights, 0.36, bottoms, color=f"C{index}", hatch=hatch, edgecolor="white", label=label)
            bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
    axes.set_xticks(range(len(found)), [line["placement"] for line in found], rotation=20)
    axes.set_ylabel("seconds of a step; left predicted, right measured")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=[*PLACEMENTS, PICK], default=[*PLACEMENTS, PICK])
    prepare()
    for name in parser.parse_args().only:
        measure(name)
    found = lines()
    figures = summary(found)
    for line in found:
        print(f"{line['placement']:22} {line['predicted_s']:.2f} {line['measured_s']:.2f} {line['error']:+.0%}")
    print(figures, "limits", LIMITS)
    result = {"summary": figures, "limits": LIMITS, "placements": found}
    write("plan_vs_measured", result, None)
    draw(found, RESULTS / "plan_vs_measured.png")


if __name__ == "__main__":
    main()
