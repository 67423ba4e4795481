"""The plan of a run: the placement that the search picked, its predicted seconds and bytes, and why others lost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from megarl.core.errors import UserError
from megarl.placement.cluster import Cluster
from megarl.placement.compute import core_share
from megarl.placement.devices import GIB
from megarl.placement.generation import rollout_seconds
from megarl.placement.host import host_problem, role_host, server_host, too_full_hosts
from megarl.placement.partitions import NAMES, Partition, Pool, in_one_pool, learns_late, names_of
from megarl.placement.placed import PHASES, UNEVEN, PlacementPlan, PoolPlan, RolePlan, why_lost
from megarl.placement.search import Allowed, Bound, Found, Result, search
from megarl.placement.shares import that_share_out
from megarl.placement.space import ALL_LAYERS, RECOMPUTE, Space
from megarl.placement.tables import AllTables, build_tables, held_bytes, served_bytes, stage_seconds
from megarl.placement.weight_sync import gather_seconds, sync_seconds
from megarl.placement.workload import ACTOR, FRACTION_FLAG, REFERENCE, ROLLOUT, TRAINED, Workload

# Stages of a step: generation, preparation, training; each is waited for.
STAGES = 3


@dataclass(frozen=True)
class Own:
    """A recipe's own placement.

    predicted: None where nothing can be said of it. problem: why it cannot run; None where it can.
    """

    predicted: PlacementPlan | None
    problem: str | None


@dataclass(frozen=True)
class Plan:
    """best: the pick. others: the best of other partitions, each with the reason why it lost. bounds: of all that is left.

    own: what the recipe itself asks for; None where that was not asked.
    """

    cluster: Cluster
    tokens: float
    best: PlacementPlan
    others: tuple[tuple[PlacementPlan, str], ...]
    bounds: tuple[Bound, ...]
    own: Own | None = None

    @property
    def own_words(self) -> str:
        """What is to say of the recipe's own placement, beside its name and its seconds."""
        assert self.own is not None
        if self.own.problem is not None:
            return f"cannot run here: {self.own.problem}"
        assert self.own.predicted is not None
        return why_lost(self.own.predicted, self.best)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of prompts and responses, a second and device."""
        return self.tokens / self.best.step_s / self.cluster.all_devices


def make_plan(
    workload: Workload,
    cluster: Cluster,
    *,
    top: int = 5,
    name: str | None = None,
    space: Space | None = None,
    allowed: Allowed | None = None,
) -> Plan:
    """The best placement, and the best of `top` partitions in all. All roles share the size of a micro-batch.

    name: only placements of that name. allowed: only such partitions. Raises UserError: an unknown name; nothing fits, with
    the smallest cluster that works.
    """
    if name is not None and name not in NAMES:
        raise UserError(
            f"There is no placement named {name!r}. Names: {', '.join(NAMES)}; without a name all are tried."
        )
    # How long an asynchronous step waits for the longest response is known of whole placements alone: more are looked at.
    # What a node's host holds likewise.
    few = not workload.staleness and all(kind.host_bytes is None for kind in cluster.kinds)
    asked = _Asked(top if few else max(top, MOST_LATE), name, space, allowed)
    # All on one kind of nodes, or the rollout on another than the ranks.
    hosts: list[tuple[Cluster, Cluster | None]] = [(kind, None) for kind in cluster.kinds]
    hosts += permutations(cluster.kinds, 2)
    looks = [
        _look(replace(workload, micro_tokens=(tokens,)), kind, asked, serving)
        for kind, serving in hosts
        for tokens in workload.micro_tokens
    ]
    best: dict[_Key, tuple[Found, _Look]] = {}
    for look in looks:
        for found in look.result.found:
            key = look.key(found.partition)
            if key not in best or found.seconds < best[key][0].seconds:
                best[key] = found, look
    if not best:
        raise UserError(_infeasible(looks[0].tables, workload, cluster.kinds[0], asked))
    # What one size of micro-batches cut away was behind `top` partitions of it: it cannot come before these.
    ranked = sorted(best.values(), key=lambda pair: pair[0].seconds)[: asked.top]
    priced = [
        (placement_plan(found, look.tables, look.workload, look.cluster, cluster), look.key(found.partition))
        for found, look in ranked
    ]
    held = [pair for pair in priced if host_problem(pair[0]) is None]
    if not held:
        raise too_full_hosts([plan for plan, _ in priced], cluster)
    priced = sorted(held, key=lambda pair: pair[0].step_s)[:top]
    plans = [plan for plan, _ in priced]
    others = tuple((plan, why_lost(plan, plans[0])) for plan in plans[1:])
    shown = {key for _, key in priced}
    return Plan(cluster, workload.tokens, plans[0], others, _bounds(looks, best, shown))


@dataclass(frozen=True)
class _Asked:
    """What a search is asked for."""

    top: int
    name: str | None
    space: Space | None
    allowed: Allowed | None

    def wants(self, partition: Partition) -> bool:
        """Whether a partition is among them."""
        named = self.name is None or self.name in names_of(partition)
        return named and (self.allowed is None or self.allowed(partition))


MOST_LATE = 8  # placements that are priced whole where some are asynchronous, or hosts have so much memory and no more

_Key = tuple[Cluster, Cluster | None, frozenset[Pool]]


@dataclass(frozen=True)
class _Look:
    """One size of micro-batches on one kind of nodes, and what was found with it. tables.serving: the rollout's kind."""

    workload: Workload
    cluster: Cluster
    tables: AllTables
    result: Result

    def key(self, partition: Partition) -> _Key:
        """What makes two placements the same but for their sizes."""
        return self.cluster, self.tables.serving, frozenset(partition)


def _look(workload: Workload, cluster: Cluster, asked: _Asked, serving: Cluster | None = None) -> _Look:
    tables = build_tables(workload, cluster, asked.space, serving=serving)

    def allowed(partition: Partition) -> bool:
        together = not workload.tied or in_one_pool(ACTOR, REFERENCE, partition)
        return together and asked.wants(partition) and (serving is None or (ROLLOUT,) in partition)

    def searched(among: AllTables) -> Result:
        return search(
            among.searched(asynchronous=workload.staleness > 0),
            devices=cluster.num_devices,
            usable=cluster.usable_bytes,
            top=asked.top,
            allowed=allowed,
        )

    return _Look(workload, cluster, tables, that_share_out(searched, tables, workload.most_dp))


def _bounds(looks: list[_Look], best: Mapping[_Key, tuple[Found, _Look]], shown: set[_Key]) -> tuple[Bound, ...]:
    """What is known of the partitions that are not shown, over all sizes of micro-batches."""
    least: dict[_Key, Bound] = {}
    for look in looks:
        for bound in look.result.others:
            key = look.key(bound.partition)
            if key not in least or bound.seconds < least[key].seconds:
                least[key] = bound
    for key, (found, _) in best.items():
        if key not in least or found.seconds < least[key].seconds:
            least[key] = Bound(found.partition, found.seconds)
    return tuple(sorted((each for key, each in least.items() if key not in shown), key=lambda each: each.seconds))


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
        roles = tuple(
            _rollout_plan(tables, row, workload, kind, shared=ACTOR in pool, asynchronous=found.asynchronous)
            if role == ROLLOUT
            else _role_plan(role, tables, row, workload, cluster)
            for role, row in zip(pool, found.rows[index], strict=True)
        )
        offloaded = sum(role.offloaded_bytes for role in roles)
        peaks = {role.role: offloaded - role.offloaded_bytes + sum(role.held_bytes.values()) for role in roles}
        fullest = max(peaks, key=lambda role: peaks[role])
        reserved = kind.rates.reserved_bytes
        pools.append(PoolPlan(devices, first[kind], roles, peaks[fullest] + reserved, fullest, kind, len(kinds) > 1))
        first[kind] += devices
    phases = {phase: _phase(phase, pools, cluster) for phase in PHASES}
    if found.asynchronous:
        # The rollout runs beside all but the sync: only what it takes longer than they do is waited for.
        beside = phases["sleep and wake"] + phases["prepare"] + phases["train"]
        # What begins after a sync has to be there for the step that comes `staleness` steps later, before its training.
        longest, old = _longest_s(found, tables, workload, cluster), workload.staleness
        late = (longest - old * (beside + phases["sync"])) / (1 + old)
        phases["rollout"] = max(0.0, phases["rollout"] - beside, late)
    # A late critic's pool likewise; what it takes longer is waited for when the next samples are there.
    whole = max(
        (sum(sum(role.seconds.values()) for role in pool.roles) for pool in pools if _is_late(pool)), default=0.0
    )
    phases["train"] += max(0.0, whole - sum(phases.values()))
    phases["between stages"] = STAGES * cluster.rates.barrier_s + sum(
        role.dispatch_s for pool in pools for role in pool.roles
    )
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


def _role_plan(role: str, tables: AllTables, row: int, workload: Workload, cluster: Cluster) -> RolePlan:
    table = tables.roles[role]
    choice = table.layouts.take(np.array([row]))
    held = held_bytes(role, choice, workload, cluster)
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
        offloaded_bytes=float(table.choices.rest[row]),
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
            "other": each * held.other,
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
        host_bytes=server_host(cluster, each),
    )


def _infeasible(tables: AllTables, workload: Workload, cluster: Cluster, asked: _Asked) -> str:
    """What is missing, and the smallest number of nodes that works."""
    what = f"No {asked.name or ''} placement".replace("  ", " ")
    own = {role: table for role, table in tables.roles.items() if not (tables.tied and role == REFERENCE)}
    lacking = [role for role, table in own.items() if not len(table.choices)]
    alone, share = tables.rollout.separate, workload.server_share
    lacking += [] if np.any(alone.rest + alone.extra <= cluster.usable_bytes) else [ROLLOUT]
    why = (
        f"{' and '.join(lacking)} alone {'does' if len(lacking) == 1 else 'do'} not fit under any layout"
        if lacking
        else "each role fits alone, but not all of them together"
    )
    text = (
        f"{what} of {', '.join(workload.roles)} fits on {cluster.describe()}: {why} into the "
        f"{cluster.usable_bytes / GIB:.1f} GiB that roles can use of each device. "
    )
    if share is not None and share * cluster.device.memory_bytes > cluster.usable_bytes:
        most = math.floor(100 * cluster.usable_bytes / cluster.device.memory_bytes) / 100
        return f"{text}rollout.server_args has {FRACTION_FLAG} {share:g}: lower it to at most {most}."
    smallest = _smallest(workload, cluster, asked)
    if smallest is None:
        return text + (
            f"No cluster of up to {max(cluster.most_nodes, cluster.nodes)} such nodes works either: take devices with more "
            "memory, shorter samples (data.max_prompt_tokens, rollout.max_response_tokens) or a smaller model."
        )
    return text + f"The smallest cluster of this kind that works: {smallest.describe()}."


def smallest_cluster(workload: Workload, cluster: Cluster) -> Cluster | None:
    """The fewest nodes of this kind that hold the run under some placement; None where no number of them does."""
    asked = _Asked(1, None, None, None)
    return (
        cluster.of_nodes(1) if _works(1, workload, cluster, asked) else _smallest(workload, cluster.of_nodes(1), asked)
    )


def _works(nodes: int, workload: Workload, cluster: Cluster, asked: _Asked) -> bool:
    # Small micro-batches hold least.
    small = replace(workload, micro_tokens=(min(workload.micro_tokens),))
    return bool(_look(small, cluster.of_nodes(nodes), replace(asked, top=1)).result.found)


def _smallest(workload: Workload, cluster: Cluster, asked: _Asked) -> Cluster | None:
    """More nodes than this cluster has."""
    most = cluster.most_nodes
    low, high = cluster.nodes, min(cluster.nodes * 2, most)
    while low < high and not _works(high, workload, cluster, asked):
        low, high = high, min(high * 2, most)
    if low >= high:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _works(middle, workload, cluster, asked) else (middle, high)
    return cluster.of_nodes(high)
