"""What a plan takes, by hand and by its bound; two buckets a rank; the page's table, and the planner's own seconds of it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings

import megarl
from megarl.core.layout import Layout
from megarl.placement.cluster import Cluster, make_cluster
from megarl.placement.rates import Rates
from megarl.placement.weight_sync import engine_s, num_tensors, sync_seconds
from megarl.sync.page import Case, Priced, priced, updated
from megarl.sync.plan import Receiver, SyncPlan, Trainer, plan_sync
from megarl.sync.price import bound, price, timeline
from tests.models.configs import PLAIN
from tests.placement.samples import GRPO, LLAMA_7B, QWEN_30B_A3B, workload
from tests.sync.plans import dense, plans

PAGE = Path(megarl.__file__).parent.parent / "docs" / "weight_sync.md"
# Bytes a second that make seconds easy: all that is there is reached, and hops take no time.
ROUND = replace(
    make_cluster("H100", 4),
    device=replace(make_cluster("H100", 1).device, memory_bytes_s=800.0, inside_bytes_s=200.0, between_bytes_s=50.0),
    rates=replace(Rates(), links=1.0, network=1.0, memory=1.0, hop_s=0.0, load_tensor_s=0.0),
)
H100 = make_cluster("H100", 4)


def test_a_broadcast_of_two_buckets_by_hand() -> None:
    plan = dense(Layout(tp=2, sequence_parallel=True, world_size=2), bucket_bytes=10**6)
    first, second = plan.buckets
    assert {first.sender, second.sender} == {0, 1}
    other = [plan.contributions(bucket, bucket.sender)[1 - bucket.sender] for bucket in plan.buckets]  # type: ignore[operator,index]
    own = [bucket.nbytes - nbytes for bucket, nbytes in zip(plan.buckets, other, strict=True)]
    gather = [max(far / 200, (2 * mine + far) / 800) for far, mine in zip(other, own, strict=True)]
    # Two ranks of the sender's node, four devices of the receiving one: two cards carry it.
    send = [bucket.nbytes / 100 for bucket in plan.buckets]
    load = [2 * bucket.nbytes / 2 / 800 for bucket in plan.buckets]
    # The second is gathered while the first is gathered and sent; the first is loaded while the second is sent.
    found = price(plan, ROUND)
    assert gather[1] < gather[0] + send[0] and load[0] < send[1]
    assert found.seconds == pytest.approx(gather[0] + send[0] + send[1] + load[1])
    assert found.bound_s == pytest.approx(plan.nbytes / 100)
    assert (found.gather_s, found.send_s, found.load_s) == pytest.approx((sum(gather), sum(send), sum(load)))


def test_servers_of_one_node_receive_once_and_a_thin_one_holds_all_up() -> None:
    trainer = Trainer(replace(PLAIN, hidden_size=8), Layout(world_size=4), (0,) * 4)
    many = plan_sync(trainer, tuple(Receiver(str(i), (1,)) for i in range(4)), "broadcast", 10**6)
    thin = plan_sync(trainer, (*many.receivers, Receiver("far", (2,))), "broadcast", 10**6)
    assert price(many, ROUND).send_s == pytest.approx(many.nbytes / 200)
    assert price(thin, ROUND).send_s == pytest.approx(many.nbytes / 50)


def test_a_hand_over_in_shared_memory_by_hand() -> None:
    trainer = Trainer(replace(PLAIN, hidden_size=8), Layout(world_size=2), (0, 0))
    receivers = Receiver("one", (0,), (0,)), Receiver("two", (0,), (1,))
    plan = plan_sync(trainer, receivers, "shared_memory", 10**6)
    [bucket] = plan.buckets
    assert price(plan, ROUND).seconds == pytest.approx(4 * bucket.nbytes / 800)
    halves = plan_sync(replace(trainer, layout=Layout(pp=2, world_size=2)), receivers, "shared_memory", 10**6)
    own = [halves.contributions(halves.buckets[0], host)[host] for host in (0, 1)]
    slowest = max((bucket.nbytes - mine) / 200 for mine in own)
    assert price(halves, ROUND).seconds == pytest.approx(slowest + 2 * bucket.nbytes / 800)
    # A rank on another node has the other half: one card of this node takes it in.
    apart = plan_sync(
        replace(trainer, layout=Layout(pp=2, world_size=2), nodes=(0, 1)), receivers[:1], "shared_memory", 10**6
    )
    assert bound(apart, ROUND) == pytest.approx((bucket.nbytes - own[0]) / 50)


@settings(deadline=None, max_examples=50)
@given(plan=plans(("broadcast", "shared_memory")))
def test_no_plan_is_below_its_bound_and_no_rank_holds_a_third_bucket(plan: SyncPlan) -> None:
    found, times = price(plan, H100), timeline(plan, H100)
    assert found.seconds >= found.bound_s
    assert found.seconds <= (found.gather_s + found.send_s + found.load_s) * (1 + 1e-9), "overlapped, or else in turn"
    held: dict[int, list[tuple[float, int]]] = {}
    for bucket, at in zip(plan.buckets, times, strict=True):
        if bucket.sender is None:
            for host in plan.hosts:
                held.setdefault(host, []).extend([(at.gather_from, 1), (at.loaded, -1)])
            continue
        held.setdefault(bucket.sender, []).extend([(at.gather_from, 1), (at.sent, -1)])
        for rank in plan.helpers(bucket.sender):
            held.setdefault(rank, []).extend([(at.send_from, 1), (at.sent, -1)])
    for events in held.values():
        now = most = 0
        for _, change in sorted(events):
            now += change
            most = max(most, now)
        assert most <= 2 and now == 0
    for before, after in pairwise(times):
        assert before.gathered <= before.send_from <= before.sent <= before.load_from <= before.loaded
        assert before.sent <= after.send_from and before.loaded <= after.load_from + 1e-12
    # Nor does a server: it has loaded the last but one before another comes in.
    assert all(first.loaded <= third.send_from + 1e-12 for first, third in zip(times, times[2:], strict=False))


def test_a_version_over_the_disk_by_hand() -> None:
    """Two senders of one node share 100 bytes a second; then every node reads, and writes down, the whole; then servers load."""
    disk = replace(ROUND, rates=replace(ROUND.rates, disk_bytes_s=100.0))
    one = dense(Layout(world_size=1), "disk", bucket_bytes=10**6)
    total = one.nbytes
    gather, load = 2 * total / 800, 2 * total / 2 / 800
    assert price(one, disk).seconds == pytest.approx(gather + total / 100 + 2 * total / 100 + load)
    assert bound(one, disk) == pytest.approx(total / 100 + total / 100)
    stages = dense(Layout(pp=2, world_size=2), "disk", bucket_bytes=10**6)
    first, second = stages.buckets
    slowest = max(2 * each.nbytes / 800 + 2 * each.nbytes / 100 for each in (first, second))
    assert price(stages, disk).seconds == pytest.approx(slowest + 2 * total / 100 + load)
    assert bound(stages, disk) == pytest.approx(2 * total / 100)
    # On a node each they do not share.
    apart = plan_sync(replace(stages.trainer, nodes=(0, 1)), stages.receivers, "disk", 10**6)
    slowest = max(2 * each.nbytes / 800 + each.nbytes / 100 for each in (first, second))
    assert price(apart, disk).seconds == pytest.approx(slowest + 2 * total / 100 + load)
    # One bucket is written while the next is gathered.
    small = dense(Layout(world_size=1), "disk", bucket_bytes=200)
    assert len(small.buckets) > 2 and small.buckets[0].nbytes / 100 > small.buckets[1].nbytes / 400
    assert price(small, disk).seconds == pytest.approx(2 * small.buckets[0].nbytes / 800 + 3 * total / 100 + load)


def test_what_is_quantised_is_priced_as_it_is_sent() -> None:
    """Linears of 256 x 256 in bfloat16, and in FP8 with a float32 for each of their four blocks."""
    config = replace(PLAIN, hidden_size=256, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=128)
    config = replace(config, ffn_hidden_size=256, vocab_size=32, tied_embeddings=True)
    plan = plan_sync(Trainer(config, Layout(world_size=1), (0,)), (Receiver("one", (1, 1)),), "broadcast", 10**9)
    weights = 7 * 256 * 256  # queries, keys, values and output; gate, up, down
    before, after = 2 * weights, weights + 7 * 4 * 4
    sent = plan.nbytes - before + after
    whole, half = (price(plan, ROUND, quantized=quantized) for quantized in (False, True))
    assert (whole.send_s, half.send_s) == pytest.approx((plan.nbytes / 50, sent / 50))
    assert half.load_s == pytest.approx(2 * sent / 2 / 800)
    assert half.gather_s == pytest.approx(whole.gather_s + (before + after) / 800)
    assert bound(plan, ROUND, quantized=True) == pytest.approx(sent / 50)
    disk = replace(ROUND, rates=replace(ROUND.rates, disk_bytes_s=100.0))
    written = replace(plan, transport="disk", buckets=plan.buckets)
    assert bound(written, disk, quantized=True) == pytest.approx(2 * sent / 100)


@pytest.fixture(scope="module")
def cases() -> dict[Case, Priced]:
    return {each.case: each for each in priced()}


def test_no_plan_of_the_page_takes_twice_its_bound(cases: dict[Case, Priced]) -> None:
    assert all(1 < each.price.ratio < 2 for each in cases.values())
    assert {case.layout.world_size for case in cases if case.split} == {64, 256}


def test_the_page_is_up_to_date(cases: dict[Case, Priced]) -> None:
    written = PAGE.read_text()
    assert written == updated(written, cases.values()), "run: python -m megarl.sync.page docs/weight_sync.md"


def test_the_search_prices_a_sync_as_its_plan_does(cases: dict[Case, Priced]) -> None:
    for case, each in cases.items():
        config = each.plan.trainer.config
        separate, shared = sync_seconds(config, workload(config, GRPO, dtype="bfloat16"), case.cluster)
        searched = (separate if case.split else shared) - engine_s(case.cluster, config)
        # The search knows neither layout nor server: it takes each device to hold one of eight parts, and servers whole. That
        # buckets of few layers come from few devices it does not know either.
        cut = case.layout.tp * case.layout.pp * case.layout.ep
        assert 0.85 < searched / each.price.seconds < (1.1 if cut >= 8 or case.split else 2.0), case


def test_tensors_are_counted_without_listing_them() -> None:
    assert num_tensors(LLAMA_7B) == 32 * 9 + 3
    assert num_tensors(QWEN_30B_A3B) == 48 * (128 * 3 + 7) + 3
    assert engine_s(H100, QWEN_30B_A3B) == pytest.approx(0.13e-3 * num_tensors(QWEN_30B_A3B))


def test_a_measured_hand_over_holds() -> None:
    """Where processes stand for devices: what was measured of a hand-over is what is predicted."""
    cluster: Cluster = make_cluster("cpu", 1)
    work = workload(LLAMA_7B, GRPO, dtype="float32")
    _, shared = sync_seconds(LLAMA_7B, work, cluster)
    total = sum(math.prod(s) for s in ((32000, 4096), (32000, 4096))) + 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert shared == pytest.approx(0.04 + 4 * total / 0.3e9, rel=1e-3)
