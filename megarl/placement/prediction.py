"""What one placement that a search found takes: seconds by phase and role, bytes of devices and hosts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.placement.cluster import Cluster
from megarl.placement.compute import core_share
from megarl.placement.generation import rollout_seconds
from megarl.placement.host import role_host, server_host
from megarl.placement.partitions import Pool, learns_late, names_of
from megarl.placement.placed import PHASES, UNEVEN, PlacementPlan, PoolPlan, RolePlan
from megarl.placement.search import Found
from megarl.placement.space import ALL_LAYERS, RECOMPUTE
from megarl.placement.tables import AllTables, held_bytes, served_bytes, stage_seconds
from megarl.placement.weight_sync import gather_seconds, sync_seconds
from megarl.placement.workload import ACTOR, ROLLOUT, TRAINED, Workload

# Stages of a step: generation, preparation, training; each is waited for.
STAGES = 3


def placement_plan(
    found: Found, tables: AllTables, workload: Workload, cluster: Cluster, within: Cluster | None = None
) -> PlacementPlan:
    """Seconds and bytes of what the search found, in detail. within: the cluster, where it has other kinds of nodes too."""
    pools = []
    kinds = (within or cluster).kinds
    first = {kind: sum(each.num_devices for each in kinds[: kinds.index(kind)]) for kind in kinds}
    order = sorted(range(len(found.partition)), key=lambda index: -found.devices[index])
    for index in order:
        pool = found.partition[index]
        elsewhere = tables.serving if pool == (ROLLOUT,) else None
        kind = elsewhere or cluster
        devices = (
            found.devices[index] if elsewhere is None else int(tables.rollout.servers.devices[found.rows[index][0]])
        )
        shared = _sharing_groups(tables, pool, found.rows[index])
        roles = tuple(
            _rollout_plan(tables, row, workload, kind, shared=ACTOR in pool, asynchronous=found.asynchronous)
            if role == ROLLOUT
            else _role_plan(role, tables, row, workload, cluster, own_groups=role not in shared)
            for role, row in zip(pool, found.rows[index], strict=True)
        )
        offloaded = sum(role.offloaded_bytes for role in roles)
        peaks = {role.role: offloaded - role.offloaded_bytes + sum(role.held_bytes.values()) for role in roles}
        fullest = max(peaks, key=lambda role: peaks[role])
        reserved = kind.rates.reserved_bytes
        pools.append(PoolPlan(devices, first[kind], roles, peaks[fullest] + reserved, fullest, kind, len(kinds) > 1))
        first[kind] += devices
    phases = {phase: _phase(phase, pools, cluster) for phase in PHASES}
    between = STAGES * cluster.rates.barrier_s + sum(role.dispatch_s for pool in pools for role in pool.roles)
    if found.asynchronous:
        # The rollout runs beside all but the sync: only what it takes longer than they do is waited for.
        beside = phases["sleep and wake"] + phases["prepare"] + phases["train"] + between
        # What begins after a sync has to be there for the step that comes `staleness` steps later, before its training.
        longest, old = _longest_s(found, tables, workload, cluster), workload.staleness
        late = (longest - old * (beside + phases["sync"])) / (1 + old)
        phases["rollout"] = max(0.0, phases["rollout"] - beside, late)
    # A late critic's pool likewise; what it takes longer is waited for when the next samples are there.
    whole = max(
        (sum(sum(role.seconds.values()) for role in pool.roles) for pool in pools if _is_late(pool)), default=0.0
    )
    phases["train"] += max(0.0, whole - sum(phases.values()))
    phases["between stages"] = between
    return PlacementPlan(names_of(found.partition), found.asynchronous, tuple(pools), sum(phases.values()), phases)


def _longest_s(found: Found, tables: AllTables, workload: Workload, cluster: Cluster) -> float:
    """Seconds of a step's longest response beside those of other steps."""
    [row] = next(rows for pool, rows in zip(found.partition, found.rows, strict=True) if pool == (ROLLOUT,))
    choice = tables.rollout.servers.take(np.array([row]))
    kind = tables.serving or cluster
    held = served_bytes(choice, workload, kind)
    return float(rollout_seconds(workload.models[ROLLOUT], choice, held, workload, kind).longest[0])


def _is_late(pool: PoolPlan) -> bool:
    return learns_late(tuple(role.role for role in pool.roles))


def _phase(phase: str, pools: list[PoolPlan], cluster: Cluster) -> float:
    """Seconds of a phase: roles of a pool after one another; stages side by side over pools, everything else in turn."""
    sums = [sum(role.seconds.get(phase, 0.0) for role in pool.roles) for pool in pools]
    if phase not in ("prepare", "train"):
        return sum(sums)
    waited = [0.0 if phase == "train" and _is_late(pool) else own for own, pool in zip(sums, pools, strict=True)]
    shares = [float(core_share(pool.devices, cluster)) for pool in pools]
    return max(*waited, sum(seconds * share for seconds, share in zip(sums, shares, strict=True)))


def _sharing_groups(tables: AllTables, pool: Pool, rows: Sequence[int]) -> set[str]:
    """Roles of a pool with a layout that another one has: they share its process groups (training/rank.py).

    These are of a role that learns, where there is one with that layout.
    """
    layouts = {
        role: tables.roles[role].layouts.layout(row) for role, row in zip(pool, rows, strict=True) if role != ROLLOUT
    }
    order = sorted(layouts, key=lambda role: role not in TRAINED)
    return {role for index, role in enumerate(order) if layouts[role] in [layouts[other] for other in order[:index]]}


def _role_plan(
    role: str, tables: AllTables, row: int, workload: Workload, cluster: Cluster, *, own_groups: bool
) -> RolePlan:
    table = tables.roles[role]
    choice = table.layouts.take(np.array([row]))
    held, counted = (
        held_bytes(role, choice, workload, cluster, own_groups=each) for each in (own_groups, table.own_groups)
    )
    kept = table.choices.rest[row] - np.ravel(counted.exchange)[0] + np.ravel(held.exchange)[0]
    cost = table.choices.cost[row]
    parts: dict[str, dict[str, float]] = {}
    dispatch_s = 0.0
    for stage, seconds in zip(("prepare", "train"), stage_seconds(role, choice, workload, cluster), strict=True):
        if seconds is not None:
            parts[stage] = {name: float(np.ravel(value)[0]) for name, value in vars(seconds).items()}
            dispatch_s += parts[stage].pop("dispatch")
    offloaded = bool(table.offloaded[row])
    gather = float(gather_seconds(workload.models[role], choice, workload, cluster)[0]) if role == ACTOR else 0.0
    layout = choice.layout(0)
    recompute, recomputed = RECOMPUTE[int(choice.recompute[0])], int(choice.recomputed[0])
    of_layers = recomputed if recompute == "full" and recomputed < ALL_LAYERS else None
    words = [str(layout), f"{int(choice.micro_tokens[0])} tokens"]
    words += (
        [f"recompute {recompute}" + (f" of {of_layers} layers" if of_layers else "")] if recompute != "none" else []
    )
    words += ["offloaded"] if offloaded else []
    return RolePlan(
        role=role,
        shape=", ".join(words),
        seconds={"sync": gather, "sleep and wake": float(cost[0]) - gather, "prepare": cost[1], "train": cost[2]},
        parts=parts,
        held_bytes={name: float(np.ravel(value)[0]) for name, value in vars(held).items()},
        offloaded_bytes=float(kept),
        choice={
            **{axis: getattr(layout, axis) for axis in ("tp", "pp", "cp", "ep", "vpp", "dp")},
            **{key: getattr(layout, key) for key in UNEVEN if getattr(layout, key) is not None},
            "micro_batch_tokens": int(choice.micro_tokens[0]),
            "recompute": recompute,
            **({"recompute_num_layers": of_layers} if of_layers else {}),
            "offloaded": offloaded,
        },
        host_bytes=role_host(held, choice, workload, cluster, offloaded=offloaded, trained=role in TRAINED),
        dispatch_s=dispatch_s,
    )


def _rollout_plan(
    tables: AllTables, row: int, workload: Workload, cluster: Cluster, *, shared: bool, asynchronous: bool
) -> RolePlan:
    table = tables.rollout
    choice = table.servers.take(np.array([row]))
    config = workload.models[ROLLOUT]
    held = served_bytes(choice, workload, cluster)
    seconds = rollout_seconds(config, choice, held, workload, cluster)
    offloaded = bool(table.offloaded[row])
    separate, together = sync_seconds(config, workload, cluster, across=tables.serving is not None)
    generation = float((seconds.flow if asynchronous else seconds.total)[0])
    running = int((seconds.flowing if asynchronous else seconds.running)[0])
    count, tp = int(choice.count[0]), int(choice.tp[0])
    # Those that share a device with each other are as fast as one, and hold what all of them hold.
    each = table.per_device
    servers = f"{count} server{'s' if count > 1 else ''} of tp{tp}, {running} sequences each"
    servers += f", {each} in the place of one" if each > 1 else ""
    parts = {name: float(np.ravel(getattr(seconds, name))[0]) for name in ("prefill", "full", "tail", "requests")}
    return RolePlan(
        role=ROLLOUT,
        shape=servers + (", offloaded" if offloaded else ""),
        seconds={
            "rollout": generation,
            "sync": together if shared else separate,
            "sleep and wake": cluster.rates.wake_s * offloaded,
        },
        parts={} if asynchronous else {"rollout": parts},
        held_bytes={
            "weights": each * float(held.weights[0]),
            "cache": each * float(held.cache[0]),
            **({"states": each * float(held.states[0])} if config.delta is not None else {}),
            "other": each * float(held.other[0]),
        },
        offloaded_bytes=each * float(table.separate.rest[row]),
        choice={
            "servers": count,
            "tp": tp,
            "memory_share": float(choice.share[0]),
            "running": running,
            "kv_tokens": int(held.cache_tokens[0]),
            "offloaded": offloaded,
        },
        host_bytes=server_host(
            cluster, each, config if workload.replays_routing else None, float(held.cache_tokens[0])
        ),
    )
