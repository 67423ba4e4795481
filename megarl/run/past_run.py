"""What a run that was made says of its placement: measured beside predicted, rates calibrated by it, and whether another
placement would now be predicted faster. Not for launching anything.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from megarl.core.errors import UserError
from megarl.placement.apply import plan_recipe
from megarl.placement.calibrate import Pairs, fit
from megarl.placement.cluster import Cluster
from megarl.placement.length_files import read_samples
from megarl.placement.lengths import ASSUMED_SPREAD, Lengths, counted, lognormal
from megarl.placement.local import run_cluster
from megarl.placement.placed import PlacementPlan
from megarl.placement.prediction import STAGES
from megarl.placement.recipe_plan import predict_recipe
from megarl.placement.workload import ROLLOUT, TRAINED, Workload, read_model, recipe_workload
from megarl.recipe.load import load_recipe
from megarl.recipe.save import RECIPE_FILE
from megarl.recipe.schema import Recipe
from megarl.report.history import METRICS_FILE, Row, read_history

# A plan's phases, and the loop's phases that they are made of (core/metrics.py).
PHASES: Mapping[str, tuple[str, ...]] = {
    "rollout": ("rollout",),
    "sync": ("sync",),
    "prepare": ("logprobs", "reference", "teacher", "values", "reward_model", "advantages"),
    "train": ("critic", "update"),
}
# What only some steps have.
SOMETIMES = ("eval", "save")
BETWEEN = "between stages"
# Fewer lengths than this say too little of a distribution's tail.
FEWEST_LENGTHS = 64
# Fewer steps than this, the first apart, say too little of a placement to advise another.
FEWEST_STEPS = 4
# What the rates still have to win in a round of calibrating: a placement is advised for a twentieth.
_ENOUGH = 0.01
# Another placement is worth a line where it is predicted to take less than this share of the time.
WORTH = 0.95
_TRAINING = ("matmul", "layer_s", "micro_s", "update_s")
_SERVING = ("decode_layer_s", "decode_s", "request_s", "serving")


@dataclass(frozen=True)
class PastRun:
    """A run as it was: recipe, workload with the lengths that it met, and median seconds of its steps by a plan's phases.

    The first step is left out where there are more: caches are cold in it. steps: how many the medians are of.
    """

    folder: Path
    recipe: Recipe
    workload: Workload
    seconds: Mapping[str, float]
    steps: int

    @property
    def step_s(self) -> float:
        """Seconds of a step without evaluations and checkpoints."""
        return sum(self.seconds.values())


def read_run(folder: Path) -> PastRun:
    """Read a run's folder. Raises UserError: not a run of `megarl train`, or no step is done."""
    recipe = load_recipe(folder / RECIPE_FILE, (), Recipe).recipe
    steps = [row for row in read_history(folder / METRICS_FILE) if row["step"] > 0 and "perf/rollout_s" in row]
    if not steps:
        raise UserError(f"{folder} has no step yet: nothing was measured that a plan could learn from.")
    steps = steps[1:] or steps
    seconds = {
        phase: _median(sum(row.get(f"perf/{name}_s", 0.0) for name in names) for row in steps)
        for phase, names in PHASES.items()
    }
    whole = _median(row["perf/step_s"] - sum(row.get(f"perf/{name}_s", 0.0) for name in SOMETIMES) for row in steps)
    seconds[BETWEEN] = max(0.0, whole - sum(seconds.values()))
    prompts = _median(row["rollout/prompt_len_mean"] for row in steps)
    workload = recipe_workload(recipe, read_model(recipe.model.path), _lengths(folder, recipe, steps), prompts)
    return PastRun(folder, recipe, workload, seconds, len(steps))


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def _lengths(folder: Path, recipe: Recipe, steps: list[Row]) -> Lengths:
    """Those of the samples that the run wrote down; where these are few, a log-normal with the mean of all."""
    limit = recipe.rollout.max_response_tokens
    found = read_samples(folder)
    if len(found) >= FEWEST_LENGTHS:
        return counted(found, limit)
    mean = _median(row["rollout/response_len_mean"] for row in steps)
    return lognormal(min(mean, limit * 0.999), ASSUMED_SPREAD, limit)


def cluster_of_run(run: PastRun) -> Cluster:
    """The cluster that the run was on, by the table of devices. Raises UserError where the table lacks its devices."""
    cluster = run_cluster(run.recipe)
    if cluster is None:
        raise UserError(
            "What the run was on is not what this machine is, by the table: give --cluster FILE or --device NAME."
        )
    return cluster


def _as_it_was(run: PastRun, cluster: Cluster) -> PlacementPlan:
    """What is predicted of the run's own placement on such nodes. What it offloaded of its servers they gave to ranks on their
    devices: then the run had the nodes of its ranks, however many the cluster has."""
    if run.recipe.rollout.offload and cluster.device.offloads_to_host:
        cluster = cluster.of_nodes(math.ceil(run.recipe.cluster.devices / cluster.devices_per_node))
    return predict_recipe(run.recipe, run.workload, cluster)


def _as_measured(plan: PlacementPlan) -> dict[str, float]:
    """Seconds by phase as a run's clock has them: sleeping and waking is part of the phase that needs it."""
    seconds = {phase: float(plan.phases[phase]) for phase in (*PHASES, BETWEEN)}
    for role in (role for pool in plan.pools for role in pool.roles):
        phase = "rollout" if role.role == ROLLOUT else "train" if role.role in TRAINED else "prepare"
        seconds[phase] += float(role.seconds.get("sleep and wake", 0.0))
    return seconds


def calibrated(run: PastRun, cluster: Cluster) -> Cluster:
    """The cluster with rates under which the run's own placement is predicted as it was measured."""

    def pairs(*phases: str) -> Callable[[Cluster], Pairs]:
        def of(each: Cluster) -> Pairs:
            predicted = _as_measured(_as_it_was(run, each))
            return [(predicted[phase], run.seconds[phase]) for phase in phases if run.seconds[phase] > 0]

        return of

    sync_s = run.seconds["sync"] - _as_measured(_as_it_was(run, cluster))["sync"]
    # What was between the stages includes the dispatch of samples.
    rates = replace(
        cluster.rates,
        barrier_s=run.seconds[BETWEEN] / STAGES,
        call_sample_s=0.0,
        sync_s=max(0.0, cluster.rates.sync_s + sync_s),
    )
    cluster = replace(cluster, rates=rates)
    names = [name for name in (*_TRAINING, *_SERVING) if getattr(rates, name) > 0]
    cluster = fit(cluster, [name for name in names if name in _TRAINING], pairs("prepare", "train"), enough=_ENOUGH)
    if run.workload.staleness or run.recipe.rollout.external is not None:
        return cluster  # what the ranks waited for is not what servers on these devices take
    return fit(cluster, [name for name in names if name in _SERVING], pairs("rollout"), enough=_ENOUGH)


def compare(run: PastRun, cluster: Cluster) -> Table:
    """What was predicted of the run's placement beside what was measured, by phase."""
    plan = _as_it_was(run, cluster)
    predicted = _as_measured(plan)
    table = Table(title=f"One step of {run.folder}", title_justify="left")
    for column in ("phase", "predicted, s", "measured, s", "error"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    rows = {name: (predicted[name], seconds) for name, seconds in run.seconds.items()}
    rows["whole step"] = (float(plan.step_s), run.step_s)
    for name, (mine, theirs) in rows.items():
        error = f"{mine / theirs - 1:+.0%}" if theirs else ""
        table.add_row(name, f"{mine:.3g}", f"{theirs:.3g}", error, end_section=name == BETWEEN)
    return table


def advice(folder: Path, cluster: Cluster | None = None) -> str | None:
    """A line where another placement on the run's own devices is predicted faster, calibrated by the run; else None.

    Placements of a synchronous run are compared with asynchronous ones as well (one version behind), and the other way
    round. A run of few steps has nothing to say.

    cluster: that it was on; default: by the table of devices. Raises UserError where nothing is known of it.
    """
    run = read_run(folder)
    if run.steps < FEWEST_STEPS:
        return None
    if run.recipe.rollout.external is not None:
        return None  # a search would place servers on the run's own devices
    known = calibrated(run, cluster or cluster_of_run(run))
    mine = _as_it_was(run, known).step_s
    best: PlacementPlan = plan_recipe(run.recipe, run.workload, known, top=1).best
    staleness = 0 if run.workload.staleness else 1
    other: PlacementPlan = plan_recipe(run.recipe, replace(run.workload, staleness=staleness), known, top=1).best
    way = ""
    # Samples of older weights are a price, which little does not pay; nor is the way to them worth it.
    if other.step_s < WORTH * min(best.step_s, mine):
        best = other
        way = f" with rollout.max_staleness={staleness}"
    if best.step_s >= WORTH * mine:
        return None
    return (
        f"Another placement is predicted to take {best.step_s:.3g} s a step instead of {mine:.3g} s{way}: {best.describe()}. "
        f"See it by: megarl plan {folder / RECIPE_FILE} --from-run {folder}"
        + (f" --max-staleness {staleness}" if way else "")
    )
