"""The plan of a run: the placement that the search picked, its predicted seconds and bytes, and why others lost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import permutations, product

import numpy as np

from megarl.core.errors import UserError
from megarl.placement.cluster import Cluster
from megarl.placement.devices import GIB
from megarl.placement.host import host_problem, too_full_hosts
from megarl.placement.partitions import NAMES, Partition, Pool, in_one_pool, names_of
from megarl.placement.placed import PlacementPlan, why_lost
from megarl.placement.prediction import placement_plan
from megarl.placement.search import Allowed, Bound, Found, Result, search
from megarl.placement.server_share import sharing
from megarl.placement.shares import that_share_out
from megarl.placement.space import Servers, Space
from megarl.placement.tables import AllTables, RoleTable, build_tables
from megarl.placement.workload import ACTOR, FRACTION_FLAG, REFERENCE, ROLLOUT, Workload


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
    looks: list[_Look] = []
    # The ranks' choices are the same wherever the servers are.
    roles: dict[tuple[Cluster, int], dict[str, RoleTable]] = {}
    for (kind, serving), tokens in product(hosts, workload.micro_tokens):
        some = replace(workload, micro_tokens=(tokens,))
        looks.append(_look(some, kind, asked, serving, roles.get((kind, tokens))))
        roles[kind, tokens] = looks[-1].tables.roles
    best: dict[_Key, tuple[Found, _Look]] = {}
    for look in looks:
        for found in look.result.found:
            key = look.key(found.partition)
            if key not in best or found.seconds < best[key][0].seconds:
                best[key] = found, look
    if not best:
        raise UserError(_infeasible(looks, workload, cluster, asked))
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


def _look(
    workload: Workload,
    cluster: Cluster,
    asked: _Asked,
    serving: Cluster | None = None,
    roles: dict[str, RoleTable] | None = None,
) -> _Look:
    tables = build_tables(workload, cluster, asked.space, serving=serving, roles=roles)

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


def _infeasible(looks: list[_Look], workload: Workload, cluster: Cluster, asked: _Asked) -> str:
    """What is missing on every kind of nodes, and the smallest number of them that works."""
    what = f"No {asked.name or ''} placement".replace("  ", " ")
    of = f"{what} of {', '.join(workload.roles)} fits on {cluster.describe()}"
    # The sizes of micro-batches follow one another, the smallest first.
    each = [next(one for one in looks if one.cluster == kind and one.tables.serving is None) for kind in cluster.kinds]
    lacking = [_lacking(look, workload, look.cluster, asked) for look in each]
    if not cluster.others:
        return f"{of}: {lacking[0]}"
    return f"{of}. " + " ".join(f"On {look.cluster.describe()}: {why}" for look, why in zip(each, lacking, strict=True))


def _lacking(look: _Look, workload: Workload, cluster: Cluster, asked: _Asked) -> str:
    """The same of one kind of nodes by itself."""
    tables = look.tables
    own = {role: table for role, table in tables.roles.items() if not (tables.tied and role == REFERENCE)}
    lacking = [role for role, table in own.items() if not len(table.choices)]
    alone, share = tables.rollout.separate, workload.server_share
    lacking += [] if np.any(alone.rest + alone.extra <= cluster.usable_bytes) else [ROLLOUT]
    why = (
        f"{' and '.join(lacking)} alone {'does' if len(lacking) == 1 else 'do'} not fit under any layout"
        if lacking
        else "each role fits alone, but not all of them together"
    )
    text = f"{why} into the {cluster.usable_bytes / GIB:.1f} GiB that roles can use of each device. "
    one = np.ones(1, np.int64)
    largest = float(sharing(Servers(one, one, np.ones(1), one), cluster, cluster.usable_bytes)[0])
    if share is not None and share > largest > 0:
        return f"{text}rollout.server_args has {FRACTION_FLAG} {share:g}: lower it to at most {math.floor(100 * largest) / 100}."
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
