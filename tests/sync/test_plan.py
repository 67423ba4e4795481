"""Every tensor reaches every server once, whole, within the limits, from ranks that hold it; and every rank plans the same."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from megarl.core.errors import UserError
from megarl.core.layout import Layout, place
from megarl.models.config import Moe
from megarl.models.parts import Dealing
from megarl.models.rules import expected_tensors, rules
from megarl.sync.plan import Receiver, SyncPlan, Trainer, plan_sync, planned_bytes, staged_bytes
from megarl.sync.senders import FUSED
from tests.sync.plans import EXPERTS, LATENT, dense, plans

SAME = """
import hashlib
from megarl.core.layout import Layout
from megarl.models.config import Mla, ModelConfig, Moe, Rope
from megarl.sync.plan import Receiver, Trainer, plan_sync
trainer = {trainer!r}
plan = plan_sync(trainer, (Receiver("one", (2, 2)),), "broadcast", 200)
print(hashlib.sha256(repr(list(plan.rows())).encode()).hexdigest())
"""


def test_two_buckets_and_what_arrives_in_columns_are_two_of_what_the_recipe_says() -> None:
    mib, tp, whole = 2**20, Layout(tp=2, world_size=2), Layout(pp=2, world_size=2)
    assert [staged_bytes(each * mib) // mib for each in (8, 64, 128, 512)] == [1, 8, 16, 16]
    assert [planned_bytes(each * mib, tp) / mib for each in (8, 64, 128, 512)] == [7.5, 60, 120, 504]
    assert planned_bytes(512 * mib, Layout(etp=2, world_size=2)) == 504 * mib
    assert planned_bytes(512 * mib, whole) == 512 * mib  # no rank holds columns
    assert (staged_bytes(1), planned_bytes(1, tp)) == (1, 1)
    # A third is made of one of them, where they are quantised.
    assert planned_bytes(96 * mib, tp, quantized=True) == 60 * mib
    assert planned_bytes(96 * mib, whole, quantized=True) == 96 * mib
    for size in (2, 3, 1000, 12345):
        assert 2 * planned_bytes(size, tp) + staged_bytes(planned_bytes(size, tp)) <= 2 * size


@settings(deadline=None, max_examples=50)
@given(plan=plans())
def test_every_tensor_is_whole_at_every_server_exactly_once(plan: SyncPlan) -> None:
    trainer = plan.trainer
    shapes, dealing = expected_tensors(trainer.config), Dealing(trainer.config, trainer.layout)
    source = {s.name: (rule, i) for rule in rules(trainer.config, trainer.spec) for i, s in enumerate(rule.sources)}
    assert sorted(tensor.name for bucket in plan.buckets for tensor in bucket.tensors) == sorted(shapes)
    # Once by each rank that puts buckets together; each of its servers has every element of every tensor once.
    got: dict[tuple[str, int], dict[str, np.ndarray]] = defaultdict(
        lambda: {name: np.zeros(shape, int) for name, shape in shapes.items()}
    )
    for row in plan.rows():
        rule, index = source[row.tensor]
        assert dealing.is_held(rule, place(row.rank, trainer.layout)), "it is of a rank that holds it"
        part = dealing.part(rule, place(row.rank, trainer.layout))
        assert len(row.receivers) > 0
        for name in row.receivers:
            once = got[name, row.sender if plan.transport == "shared_memory" else -1][row.tensor]
            size = 0
            for where in part.ranges(index):
                held = once[where] if part.columns is None else once[where, part.columns]
                held += 1
                size += held.size
            assert row.nbytes == size * (4 if rule.is_buffer else trainer.bytes_each)
    assert {name for name, _ in got} == {each.name for each in plan.receivers}
    for tensors in got.values():
        assert all((count == 1).all() for count in tensors.values())


@settings(deadline=None, max_examples=30)
@given(plan=plans())
def test_buckets_are_within_the_limit_unless_one_tensor_is_larger(plan: SyncPlan) -> None:
    for number, bucket in enumerate(plan.buckets):
        assert bucket.number == number and bucket.nbytes == sum(tensor.nbytes for tensor in bucket.tensors)
        layers = {tensor.name.rpartition("self_attn")[0] for tensor in bucket.tensors}
        # The two tensors that an engine fuses count as one.
        pair = len(bucket.tensors) == 2 and len(layers) == 1 and "_a_proj" in bucket.tensors[1].name
        assert bucket.nbytes <= plan.bucket_bytes or len(bucket.tensors) == 1 or pair


@settings(deadline=None, max_examples=30)
@given(plan=plans(("disk",)))
def test_senders_of_a_stage_differ_by_one_tensor_at_most_and_send_their_own(plan: SyncPlan) -> None:
    layout = plan.trainer.layout
    largest: dict[int, int] = defaultdict(int)
    loads: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for bucket in plan.buckets:
        assert bucket.sender is not None
        where = place(bucket.sender, layout)
        for tensor in bucket.tensors:
            assert tensor.stage == where.pp and tensor.ep in (None, where.ep)
            loads[where.pp][bucket.sender] += tensor.nbytes
        fused = [tensor.nbytes for tensor in bucket.tensors if "_a_proj" in tensor.name]
        largest[where.pp] = max(largest[where.pp], sum(fused), *(tensor.nbytes for tensor in bucket.tensors))
    assert set(loads) == set(range(layout.pp)), "every stage sends"
    for stage, sent in loads.items():
        senders = max(layout.tp, layout.ep * layout.etp if plan.trainer.config.moe else 1)
        least = min(sent.values()) if len(sent) >= senders else 0
        assert max(sent.values()) - least <= largest[stage]


def test_tensor_parallel_ranks_take_turns_and_share_every_gather() -> None:
    plan = dense(Layout(tp=2, pp=2, sequence_parallel=True, world_size=4), bucket_bytes=10**6)
    assert [bucket.sender for bucket in plan.buckets] == sorted(range(4), key=lambda rank: plan.sent_bytes[rank])
    cut = [row for row in plan.rows() if row.tensor == "model.layers.0.mlp.gate_proj.weight"]
    assert [(row.part, row.rank, row.nbytes) for row in cut] == [(0, 0, 32), (1, 1, 32)]
    assert {row.sender for row in cut} < {0, 1} and cut[0].receivers == ("one", "two")
    # A norm is whole on both: its sender gives it.
    assert all(row.rank == row.sender for row in plan.rows() if "norm" in row.tensor)
    assert plan.helpers(1) == (0, 2, 3)


def test_buckets_of_all_senders_alternate_and_the_largest_tensors_go_first() -> None:
    plan = dense(Layout(pp=2, world_size=2))
    turns = [bucket.sender for bucket in plan.buckets]
    counts = {sender: turns.count(sender) for sender in (0, 1)}
    for sender, count in counts.items():
        at = [index for index, each in enumerate(turns) if each == sender]
        assert all(abs(index - (turn + 0.5) * len(turns) / count) <= 1.5 for turn, index in enumerate(at))
        sizes = [tensor.nbytes for index in at for tensor in plan.buckets[index].tensors]
        assert sizes == sorted(sizes, reverse=True)


def test_every_expert_parallel_rank_sends_its_own_experts() -> None:
    layout = Layout(pp=2, ep=2, world_size=8)
    trainer = Trainer(EXPERTS, layout, (0,) * 8)
    plan = plan_sync(trainer, (Receiver("one", (1,)),), "broadcast", 10**6)
    assert {row.tensor.split(".")[5]: row.sender for row in plan.rows() if "layers.1.mlp.experts" in row.tensor} == {
        "0": 4,
        "1": 4,
        "2": 5,
        "3": 5,
    }


def test_a_tensor_of_all_experts_is_given_by_those_who_hold_some() -> None:
    config = replace(EXPERTS, moe=Moe(4, 1, 8, biases=True))
    plan = plan_sync(
        Trainer(config, Layout(pp=2, ep=2, world_size=8), (0,) * 8), (Receiver("one", (1,)),), "broadcast", 10**6
    )
    for name, parts, nbytes in (("gate_up_proj", 2, 8 * 8 * 2), ("down_proj", 1, 8 * 8 * 2), ("down_proj_bias", 1, 16)):
        rows = [row for row in plan.rows() if row.tensor == f"model.layers.1.mlp.experts.{name}"]
        # Gate and up of experts 0 and 1, then of 2 and 3, whose ranks are the second stage's first two.
        assert [row.rank for row in rows] == [4] * 2 * parts + [5] * 2 * parts
        assert {row.nbytes for row in rows} == {nbytes} and len({row.sender for row in rows}) == 1
    shapes = {tensor.name: tensor.shape for bucket in plan.buckets for tensor in bucket.tensors}
    assert shapes == expected_tensors(config)


def test_a_tensor_of_all_experts_is_given_by_all_who_share_one() -> None:
    config = replace(EXPERTS, moe=Moe(4, 1, 8), family="granitemoe")
    layout = Layout(ep=2, etp=2, world_size=4)
    plan = plan_sync(Trainer(config, layout, (0,) * 4), (Receiver("one", (1,)),), "broadcast", 10**6)
    for name, parts in (("input_linear", 2), ("output_linear", 1)):
        rows = [row for row in plan.rows() if row.tensor == f"model.layers.1.block_sparse_moe.{name}.weight"]
        # Halves of gate, and of up, of experts 0 and 1 are of the first two ranks, and of 2 and 3 of the others.
        assert [row.rank for row in rows] == [0, 1] * 2 * parts + [2, 3] * 2 * parts
        assert {row.nbytes for row in rows} == {8 * 4 * 2} and len({row.sender for row in rows}) == 1
    assert {tensor.name: tensor.shape for bucket in plan.buckets for tensor in bucket.tensors} == expected_tensors(
        config
    )


def test_beyond_the_most_senders_ranks_of_a_node_share_one() -> None:
    layout = Layout(ep=4, pp=2, world_size=8)
    trainer = Trainer(EXPERTS, layout, (0,) * 4 + (1,) * 4)
    few = plan_sync(trainer, (Receiver("one", (2,)),), "broadcast", 10**6, most_senders=4)
    assert sorted(few.sent_bytes) == [0, 2, 4, 6]
    assert all(trainer.nodes[row.rank] == trainer.nodes[row.sender] for row in few.rows())
    one = plan_sync(trainer, (Receiver("one", (2,)),), "broadcast", 10**6, most_senders=1)
    assert sorted(one.sent_bytes) == [0, 4], "no tensor leaves its stage's node on the way to its sender"


@pytest.mark.parametrize("bucket_bytes", [1, 50, 100, 200])
def test_what_an_engine_fuses_is_in_one_bucket(bucket_bytes: int) -> None:
    assert len([row for row in rules(LATENT, "torch") if row.megatron.endswith(FUSED)]) == 4
    trainer = Trainer(LATENT, Layout(tp=2, sequence_parallel=True, world_size=2), (0, 0))
    plan = plan_sync(trainer, (Receiver("one", (1,)),), "broadcast", bucket_bytes)
    at = {tensor.name: bucket.number for bucket in plan.buckets for tensor in bucket.tensors}
    for layer in (0, 1):
        name = f"model.layers.{layer}.self_attn."
        assert at[f"{name}q_a_proj.weight"] == at[f"{name}kv_a_proj_with_mqa.weight"]


def test_shared_memory_takes_what_is_near_and_mixes_the_stages() -> None:
    layout = Layout(tp=2, pp=2, sequence_parallel=True, world_size=8)
    # Ranks 0-3 are stage 0. Each node has all of the model: two ranks of either stage.
    trainer = Trainer(EXPERTS, replace(layout, ep=2), (0, 0, 1, 1, 0, 0, 1, 1))
    receivers = Receiver("one", (0, 0), (0, 1)), Receiver("two", (1, 1), (2, 3))
    plan = plan_sync(trainer, receivers, "shared_memory", 1000)
    assert plan.hosts == (0, 1, 2, 3) and plan.served(2) == ("two",)
    assert all(trainer.nodes[row.rank] == trainer.nodes[row.sender] for row in plan.rows())
    assert set(plan.sent_bytes.values()) == {plan.nbytes}
    for bucket in plan.buckets[:-1]:
        assert {tensor.stage for tensor in bucket.tensors} == {0, 1}


def test_a_server_without_devices_takes_from_the_first_rank_of_its_node() -> None:
    trainer = Trainer(EXPERTS, Layout(ep=2, world_size=4), (0, 0, 1, 1))
    plan = plan_sync(trainer, (Receiver("one", (1,)), Receiver("two", (0,))), "shared_memory", 1000)
    assert plan.hosts == (0, 2) and plan.served(0) == ("two",) and plan.served(2) == ("one",)
    with pytest.raises(UserError, match="two is on others: send to them by broadcast"):
        plan_sync(trainer, (Receiver("one", (1,)), Receiver("two", (1, 2))), "shared_memory", 1000)


def test_every_file_has_one_writer() -> None:
    plan = dense(Layout(tp=2, sequence_parallel=True, world_size=2), "disk", 200)
    files = [plan.file(bucket) for bucket in plan.buckets]
    assert len(set(files)) == len(files) and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert {bucket.sender for bucket in plan.buckets} == {0, 1}


def test_every_process_makes_the_same_plan() -> None:
    layout = Layout(tp=2, pp=2, ep=2, sequence_parallel=True, world_size=8)
    trainer = Trainer(EXPERTS, layout, (0,) * 4 + (1,) * 4)
    rows = list(plan_sync(trainer, (Receiver("one", (2, 2)),), "broadcast", 200).rows())
    here = hashlib.sha256(repr(rows).encode()).hexdigest()
    env = os.environ | {"PYTHONHASHSEED": "7"}
    run = subprocess.run(
        [sys.executable, "-c", SAME.format(trainer=trainer)], capture_output=True, text=True, check=True, env=env
    )
    assert run.stdout.strip() == here
