"""The search against brute force, on made-up choices and on real ones; partitions against Bell's numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models.config import ModelConfig
from megarl.placement.cluster import make_cluster
from megarl.placement.frontier import Choices, undominated
from megarl.placement.partitions import Partition, names_of, partitions
from megarl.placement.search import Tables, search
from megarl.placement.space import Space
from megarl.placement.tables import build_tables
from megarl.placement.workload import ACTOR, CRITIC, REFERENCE, ROLLOUT
from tests.placement.samples import GRPO, PPO, QWEN_7B, QWEN_30B_A3B, workload


def whole(tables: Tables, partition: Partition, pick: dict[str, int], usable: float, flows: bool) -> tuple[int, float]:
    """Devices and seconds of one placement, written from the definition; too many devices stand for an impossible one."""
    devices, add, prepare, train, beside, loads = 0, 0.0, 0.0, 0.0, 0.0, np.zeros(2)
    for pool in partition:
        rows = []
        for role in pool:
            table = tables.shared if role == ROLLOUT and ACTOR in pool else tables.roles[role]
            if role == ROLLOUT and flows:
                assert tables.flowing is not None
                table = tables.flowing
            rows.append((table, pick[role]))
        if tables.tied and {ACTOR, REFERENCE} <= set(pool) and pick[REFERENCE] % tables.tied != pick[ACTOR]:
            return 10**9, np.inf
        sizes = {int(table.devices[row]) for table, row in rows}
        offloaded = sum(table.rest[row] for table, row in rows)
        if len(sizes) > 1 or offloaded + max(table.extra[row] for table, row in rows) > usable:
            return 10**9, np.inf
        devices += sizes.pop()
        costs = np.array([table.cost[row] for table, row in rows]).sum(axis=0)
        add += costs[0]
        prepare, beside = max(prepare, costs[1]), max(beside, costs[3])
        if CRITIC in pool and not {ACTOR, ROLLOUT}.intersection(pool):
            # Its updates are waited for when the next samples are there: what it does in all is a bound of its own.
            beside = max(beside, costs[0] + costs[1] + costs[2])
        else:
            train = max(train, costs[2])
        loads += costs[4:] if len(costs) > 4 else 0.0
    return devices, max(beside, add + max(prepare, loads[0]) + max(train, loads[1]))


def brute_force(tables: Tables, devices: int, usable: float) -> dict[Partition, float]:
    """Best seconds of every partition."""
    best: dict[Partition, float] = {}
    for partition in partitions(tuple(tables.roles)):
        key = tuple(sorted(partition))
        best[key] = np.inf
        for flows in (False, True) if tables.flowing and (ROLLOUT,) in partition else (False,):
            shared = any(ACTOR in pool and ROLLOUT in pool for pool in partition)
            sizes = {role: len(table) for role, table in tables.roles.items()}
            sizes[ROLLOUT] = len(tables.shared if shared else tables.roles[ROLLOUT])
            if flows and tables.flowing is not None:
                sizes[ROLLOUT] = len(tables.flowing)
            for rows in product(*map(range, sizes.values())):
                taken, seconds = whole(tables, partition, dict(zip(sizes, rows, strict=True)), usable, flows)
                if taken <= devices:
                    best[key] = min(best[key], seconds)
    return best


def choices(draw: st.DrawFn, most: int, beside: Choices | None = None) -> Choices:
    """beside: of which these are the same sizes, twice over."""
    rows = draw(st.integers(0, most)) if beside is None else 2 * len(beside)
    figures = st.lists(st.integers(0, 6), min_size=rows, max_size=rows)

    def column() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array(draw(figures), np.float64)

    sizes = draw(st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=rows, max_size=rows))
    sizes = sizes if beside is None else np.tile(beside.devices, 2)
    cost = np.array([column() for _ in range(6)]).T.reshape(rows, 6)
    cost[:, 3] = 0
    cost[:, 4:] *= draw(st.booleans())
    return Choices(np.array(sizes, np.int64), column(), column(), cost, np.arange(rows)[:, None])


@st.composite
def made_up(draw: st.DrawFn) -> Tables:
    roles = draw(st.sampled_from([(ACTOR, ROLLOUT), GRPO, (ACTOR, ROLLOUT, REFERENCE, CRITIC)]))
    most = 4 if len(roles) > 3 else 6
    flowing = None
    if draw(st.booleans()):
        flowing = choices(draw, most)
        flowing.cost[:, 3] = flowing.cost[:, 1] * 3
        flowing.cost[:, [1, 2, 4, 5]] = 0
    made = {role: choices(draw, most) for role in roles}
    tied = len(made[ACTOR]) if REFERENCE in roles and draw(st.booleans()) else 0
    if tied:
        made[REFERENCE] = choices(draw, most, made[ACTOR])
    return Tables(made, choices(draw, most), flowing, tied)


@settings(max_examples=120)
@given(tables=made_up(), devices=st.sampled_from([2, 4, 8, 16]), usable=st.integers(3, 20), top=st.integers(1, 20))
def test_equals_brute_force_on_made_up_choices(tables: Tables, devices: int, usable: int, top: int) -> None:
    expected = brute_force(tables, devices, usable)
    ranked = sorted(seconds for seconds in expected.values() if seconds < np.inf)
    result = search(tables, devices=devices, usable=usable, top=top)
    assert [found.seconds for found in result.found] == pytest.approx(ranked[:top])
    for found in result.found:
        assert expected[tuple(sorted(found.partition))] == pytest.approx(found.seconds)
        assert sum(found.devices) <= devices
    assert len(result.found) + len(result.others) == len(expected)
    for bound in result.others:
        assert bound.seconds <= expected[tuple(sorted(bound.partition))] * (1 + 1e-9)


SMALL = Space(tp=(1, 2), pp=(1, 2), cp=(1,), ep=(1, 8), recompute=("full",), memory_shares=(0.4, 0.8))


@settings(max_examples=12)
@given(
    config=st.sampled_from([QWEN_7B, QWEN_30B_A3B, replace(QWEN_7B, num_layers=29)]),
    nodes=st.sampled_from([1, 2]),
    prompts=st.sampled_from([64, 1024]),
    mini_batches=st.sampled_from([1, 8]),
    staleness=st.integers(0, 1),
    device=st.sampled_from(["A100-80", "H100", "H200"]),
)
def test_equals_brute_force_on_recipes(
    config: ModelConfig, nodes: int, prompts: int, mini_batches: int, staleness: int, device: str
) -> None:
    cluster = make_cluster(device, nodes, 4 if nodes == 2 else 8)
    work = workload(
        config, GRPO, prompts=prompts, mini_batches=mini_batches, staleness=staleness, micro_tokens=(2048, 8192)
    )
    tables = build_tables(work, cluster, SMALL).searched(asynchronous=staleness > 0)
    expected = brute_force(tables, cluster.num_devices, cluster.usable_bytes)
    ranked = sorted(seconds for seconds in expected.values() if seconds < np.inf)
    result = search(tables, devices=cluster.num_devices, usable=cluster.usable_bytes, top=5)
    assert [found.seconds for found in result.found] == pytest.approx(ranked)


def test_partitions_are_as_many_as_bell_says_and_all_different() -> None:
    for count, bell in enumerate((1, 1, 2, 5, 15, 52)):
        found = {frozenset(map(frozenset, partition)) for partition in partitions(PPO[:count])}
        assert len(found) == bell


def test_names_of_placements() -> None:
    assert names_of((PPO,)) == ("colocate",)
    assert names_of(tuple((role,) for role in PPO)) == ("standalone",)
    assert names_of((("actor", "reference"), ("critic", "reward_model"), ("rollout",))) == ("split",)
    assert names_of((("actor", "rollout"), ("reference", "critic", "reward_model"))) == ("hybrid",)
    assert names_of((("actor",), ("rollout", "reference", "critic", "reward_model"))) == ("mixed",)
    assert names_of((("actor",), ("rollout",))) == ("standalone", "split")


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), max_size=40))
def test_a_filter_keeps_one_of_everything_that_nothing_beats(rows: list[tuple[int, int, int]]) -> None:
    cost = np.array(rows, np.float64).reshape(-1, 3)
    kept = [rows[index] for index in undominated(cost)]
    unbeaten = {a for a in rows if not any(b != a and all(x <= y for x, y in zip(b, a, strict=True)) for b in rows)}
    assert sorted(kept) == sorted(unbeaten)


@pytest.mark.parametrize("name", ["colocate", "hybrid", "split", "standalone"])
def test_named_placements_are_points_of_the_space(name: str) -> None:
    assert any(name in names_of(partition) for partition in partitions(PPO))
