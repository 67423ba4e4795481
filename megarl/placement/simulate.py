"""Plays the steps of a whole run on a placement: lengths are drawn, devices fail, an asynchronous rollout runs ahead.

A prediction says what a step takes on average; this says how far steps spread, what failures cost, and how much of its time
each pool works. Same seed, same run. It does not model what a prediction does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from megarl.core.errors import UserError
from megarl.placement.cluster import Cluster
from megarl.placement.generation import prefill_seconds, step_model
from megarl.placement.lengths import Floats
from megarl.placement.placed import PlacementPlan, PoolPlan, RolePlan
from megarl.placement.simulate_async import Flow, play
from megarl.placement.workload import ROLLOUT, Workload

HOUR_S = 3600.0
# So often a run fails between two checkpoints until it counts as one that never comes to the next.
MOST_TRIES = 1000


@dataclass(frozen=True)
class Conditions:
    """Under which a run is played.

    hours_between_failures: of one device. The default is what Llama 3's training on 16,384 H100 met: 419 unexpected
    interruptions in 54 days (arXiv 2407.21783, section 3.3.4). restart_s: from a failure to the next step's start. save_every:
    steps between checkpoints, None: the only one is the last step's; a failure loses what came after the last.
    """

    hours_between_failures: float = 50_700.0
    restart_s: float = 600.0
    save_every: int | None = 10
    seed: int = 1


@dataclass(frozen=True)
class Played:
    """A run that was played.

    step_s: [N] seconds of each step that counted, waits for samples included. rollout_s: [N] of its generation; tail_s: [N]
    of it, while fewer than a quarter of the sequences that a server holds still ran; of an asynchronous run what servers
    worked while the step was the one under way, for whichever step. busy_s: seconds of work by pool.
    failures: how many there were; lost_s: steps done twice and restarts.
    """

    total_s: float
    step_s: Floats
    rollout_s: Floats
    tail_s: Floats
    busy_s: tuple[float, ...]
    failures: int
    lost_s: float

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        lists = {name: getattr(self, name).tolist() for name in ("step_s", "rollout_s", "tail_s")}
        return {**lists, **{name: getattr(self, name) for name in ("total_s", "busy_s", "failures", "lost_s")}}


def simulate(placement: PlacementPlan, workload: Workload, steps: int, conditions: Conditions) -> Played:
    """Play so many steps."""
    random = np.random.default_rng(conditions.seed)
    sums = np.array([(each.sum(), np.square(each).sum()) for each in _drawn(random, workload, steps)])
    expected = workload.samples * (workload.prompt_tokens + workload.responses.mean)
    share = (workload.samples * workload.prompt_tokens + sums[:, 0]) / expected
    stages = float(placement.phases["prepare"] + placement.phases["train"]) * share
    # The same lengths once more: all of them at once may be more than a machine's memory holds.
    again = _drawn(np.random.default_rng(conditions.seed), workload, steps)
    if placement.asynchronous:
        step_s, rollout, tail = _asynchronous(again, stages, _age(*sums.sum(axis=0)), placement, workload)
    else:
        step_s, rollout, tail = _synchronous(again, stages, placement, workload)
    total, lost, failures = _with_failures(step_s, placement, conditions, random)
    busy = tuple(
        float(
            np.sum(rollout) * any(role.role == ROLLOUT for role in pool.roles)
            + np.sum(stages) * _stage_share(pool, placement)
        )
        for pool in placement.pools
    )
    return Played(total, step_s, rollout, tail, busy, failures, lost)


def _drawn(random: np.random.Generator, workload: Workload, steps: int) -> Iterator[Floats]:
    """[samples] lengths of responses, step by step."""
    lengths = workload.responses
    for _ in range(steps):
        yield np.interp(random.random(workload.samples), lengths.levels, lengths.values)


def _synchronous(
    tokens: Iterable[Floats], stages: Floats, placement: PlacementPlan, workload: Workload
) -> tuple[Floats, Floats, Floats]:
    """[N] seconds of steps, of their rollouts and of their tails: one thing after the other."""
    kind, role = _rollout(placement)
    rollout, tail = np.array([_rollout_seconds(each, role, workload, kind) for each in tokens]).T
    fixed = sum(float(placement.phases[phase]) for phase in ("sync", "sleep and wake", "between stages"))
    return rollout + stages + fixed, rollout, tail


def _asynchronous(
    tokens: Iterable[Floats], stages: Floats, age: float, placement: PlacementPlan, workload: Workload
) -> tuple[Floats, Floats, Floats]:
    """The same where servers go on while ranks train. age: tokens that a response has on average while it runs."""
    kind, role = _rollout(placement)
    count, tp, running = (int(role.choice[name]) for name in ("servers", "tp", "running"))
    # What a server reads and is asked keeps its sequences waiting; both are of a whole step.
    prefill = float(prefill_seconds(workload.models[ROLLOUT], count * tp, tp, workload, kind))
    start_s = (prefill + workload.samples * kind.rates.request_s) * count / workload.samples
    context = workload.prompt_tokens + age
    batch = np.maximum(np.arange(running + 1, dtype=np.float64), 1)
    flow = Flow(
        tokens=(each.reshape(workload.prompts, -1) for each in tokens),
        train_s=stages + float(placement.phases["between stages"]),
        sync_s=float(placement.phases["sync"]),
        staleness=workload.staleness,
        servers=count,
        start_s=start_s,
        decode_s=step_model(workload, kind, tp, count)(batch, context),
    )
    played = play(flow)
    step_s, busy_s, tail_s = (np.diff(each, prepend=0.0) for each in (played.end_s, played.busy_s, played.tail_s))
    return step_s, busy_s, tail_s


def _age(total: float, squares: float) -> float:
    """Tokens that a response has on average while it runs, E[L^2] / 2 E[L]: long ones run for longer."""
    return float(squares / (2 * total))


def _rollout(placement: PlacementPlan) -> tuple[Cluster, RolePlan]:
    """The devices of the servers, and what is planned for them."""
    return next((pool.kind, role) for pool in placement.pools for role in pool.roles if role.role == ROLLOUT)


def _rollout_seconds(tokens: Floats, rollout: RolePlan, workload: Workload, cluster: Cluster) -> tuple[float, float]:
    """Seconds until the slowest server has answered everything, and of it the tail.

    Samples are assigned to servers in turn. A server runs as many as it holds; whoever ends gives its place to the next.
    """
    count, cap = int(rollout.choice["servers"]), int(rollout.choice["running"])
    each = -(-len(tokens) // count)
    assigned = np.zeros(count * each)
    assigned[: len(tokens)] = tokens
    queues = assigned.reshape(each, count).T
    slots = queues[:, :cap].copy()
    rows = np.arange(count)
    for index in range(cap, each):
        slots[rows, np.argmin(slots, axis=1)] += queues[:, index]
    ends = np.sort(slots, axis=1)
    width = np.diff(ends, prepend=0.0, axis=1)
    running = np.arange(ends.shape[1], 0, -1)
    seconds = step_model(workload, cluster, int(rollout.choice["tp"]), count)
    context = workload.prompt_tokens + _age(tokens.sum(), np.square(tokens).sum())
    spent = width * seconds(running.astype(np.float64), context)[None, :]
    slowest = int(np.argmax(spent.sum(axis=1)))
    fixed = sum(float(rollout.parts.get("rollout", {}).get(name, 0.0)) for name in ("prefill", "requests"))
    tail = float(spent[slowest, running < max(cap / 4, 1)].sum())
    return float(spent[slowest].sum()) + fixed, tail


def _with_failures(
    step_s: Floats, placement: PlacementPlan, conditions: Conditions, random: np.random.Generator
) -> tuple[float, float, int]:
    """Seconds of the whole run, of them lost, and failures. What fails stops the run, which goes on from a checkpoint.

    Raises UserError where it never comes to the next checkpoint.
    """
    devices = sum(pool.devices for pool in placement.pools)
    mean_s = conditions.hours_between_failures * HOUR_S / devices
    clock, failures, step, since_saved = 0.0, 0, 0, 0.0
    lost, next_failure = 0.0, random.exponential(mean_s)
    saved = tries = 0
    while step < len(step_s):
        if clock + step_s[step] > next_failure:
            failures, tries = failures + 1, tries + 1
            if tries == MOST_TRIES:
                raise UserError(
                    f"The played run does not come from step {saved} to its next checkpoint: {devices} devices fail every "
                    f"{mean_s / HOUR_S:.2g} h. Set train.save_every to fewer steps, or leave --simulate out."
                )
            lost += since_saved + (next_failure - clock) + conditions.restart_s
            clock = next_failure + conditions.restart_s
            next_failure = clock + random.exponential(mean_s)
            step, since_saved = saved, 0.0
            continue
        clock += step_s[step]
        since_saved += step_s[step]
        step += 1
        if conditions.save_every is not None and step % conditions.save_every == 0:
            saved, since_saved, tries = step, 0.0, 0
    return clock, lost, failures


def _stage_share(pool: PoolPlan, placement: PlacementPlan) -> float:
    """What a pool works, as a share of the two stages; a critic that learns beside the next rollout may be above 1."""
    both = float(placement.phases["prepare"] + placement.phases["train"])
    own = sum(float(role.seconds.get(stage, 0.0)) for role in pool.roles for stage in ("prepare", "train"))
    return own / both if both else 0.0


def render_simulation(played: Played, placement: PlacementPlan) -> Table:
    """The run as a table."""
    table = Table(title=f"{len(played.step_s)} steps, played", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    low, middle, high = np.quantile(played.step_s, (0.05, 0.5, 0.95))
    rows = {
        "whole run": f"{played.total_s / HOUR_S:.2f} h",
        "step, 5% / median / 95%": f"{low:.4g} / {middle:.4g} / {high:.4g} s",
        "step, predicted": f"{placement.step_s:.4g} s",
        "tail of the rollout": f"{played.tail_s.sum() / max(played.rollout_s.sum(), 1e-12):.0%} of generation",
        "failures": f"{played.failures}, {played.lost_s / HOUR_S:.2f} h lost ({played.lost_s / played.total_s:.1%})",
    }
    for pool, busy in zip(placement.pools, played.busy_s, strict=True):
        rows[f"{'+'.join(role.role for role in pool.roles)} on {pool.devices}"] = f"{busy / played.total_s:.0%} busy"
    for what, value in rows.items():
        table.add_row(what, value)
    return table
