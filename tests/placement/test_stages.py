"""What ranks of a pipeline hold, against the cut that the engine makes, and cuts against every cut that there is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

from megarl.core.layout import Layout, stage_layers
from megarl.models.config import ModelConfig, Moe
from megarl.placement.cluster import make_cluster
from megarl.placement.compute import batches, score_seconds, update_seconds
from megarl.placement.cuts import Weights, all_cuts, cuts, kept, loads, multiplied
from megarl.placement.layers import micro_batch
from megarl.placement.memory import Role, role_bytes
from megarl.placement.sizes import model_sizes
from megarl.placement.space import Layouts, Space, layouts, one_layout
from megarl.placement.stages import Stage, alive, stages
from tests.placement.samples import LLAMA_7B, model, workload


@cache
def deep(num_layers: int, dense: int, vocab: int = 1000, tied: bool = False) -> ModelConfig:
    """A model whose first layers have no experts, as DeepSeek-V3's three have none."""
    config = model(num_layers, 64, 4, 4, 256, vocab, tied=tied)
    if dense >= num_layers:
        return config
    return replace(config, moe=Moe(8, 2, 64, 64), moe_layers=frozenset(range(dense, num_layers)))


models = st.builds(deep, st.integers(2, 70), st.integers(0, 80), st.sampled_from([10, 1000, 50_000]), st.booleans())
sizes = st.tuples(st.sampled_from([1, 2, 3, 4, 8, 16]), st.sampled_from([1, 2, 4]))


def of(config: ModelConfig, pp: int, vpp: int, first: int, last: int) -> Layout:
    return Layout(pp=pp, vpp=vpp, first_stage_layers=first or None, last_stage_layers=last or None, world_size=pp)


def fullest(config: ModelConfig, layout: Layout, weights: Weights) -> float:
    """What the rank with most has, layer by layer."""
    each = np.diff(weights.sums)
    ranks = stage_layers(layout, config.num_layers)
    amounts = [float(sum(each[layer] for part in rank for layer in part)) for rank in ranks]
    return max(amounts[0] + weights.embedding, *amounts[1:-1], amounts[-1] + weights.head)


@given(config=models, size=sizes, head=st.booleans())
def test_every_cut_is_one_that_the_engine_accepts_and_deals_all_layers(
    config: ModelConfig, size: tuple[int, int], head: bool
) -> None:
    pp, vpp = size
    for first, last in cuts(config, pp, vpp, head=head):
        ranks = stage_layers(of(config, pp, vpp, first, last), config.num_layers)
        assigned = sorted(layer for rank in ranks for part in rank for layer in part)
        assert assigned == list(range(config.num_layers))


@given(config=models, size=sizes, head=st.booleans())
def test_a_model_is_cut_wherever_the_engine_can_cut_it(config: ModelConfig, size: tuple[int, int], head: bool) -> None:
    pp, vpp = size
    # Each rank needs vpp layers or a multiple; the middle ones alike.
    can = any(
        config.num_layers - (pp - 2) * middle - first in range(vpp, config.num_layers, vpp)
        for middle in range(vpp, config.num_layers + 1, vpp)
        for first in range(vpp, config.num_layers, vpp)
    )
    assert bool(cuts(config, pp, vpp, head=head)) == (can if pp > 1 else vpp == 1)


@given(config=models, size=sizes, head=st.booleans())
def test_no_cut_that_can_be_said_is_faster_or_fits_better(
    config: ModelConfig, size: tuple[int, int], head: bool
) -> None:
    pp, vpp = size
    proposed = cuts(config, pp, vpp, head=head)
    if pp == 1 or not proposed:
        return
    for weights in (multiplied(config, head=head), kept(config, head=head)):
        best = min(fullest(config, of(config, pp, vpp, *cut), weights) for cut in proposed)
        every = all_cuts(config.num_layers, pp, vpp)
        assert best == pytest.approx(
            min(fullest(config, of(config, pp, vpp, int(first), int(last)), weights) for first, _, last in every)
        )
        assert best == pytest.approx(loads(every, pp, vpp, weights).max(axis=1).min())


@given(config=models, size=sizes, head=st.booleans())
def test_what_ranks_hold_is_what_the_engine_deals_them(config: ModelConfig, size: tuple[int, int], head: bool) -> None:
    pp, vpp = size
    for first, last in cuts(config, pp, vpp, head=head):
        layout = of(config, pp, vpp, first, last)
        ranks = [[layer for part in rank for layer in part] for rank in stage_layers(layout, config.num_layers)]
        expected = [
            (len(held), len(config.moe_layers.intersection(held)), rank == 0, rank == pp - 1, alive(rank, pp, vpp))
            for rank, held in enumerate(ranks)
        ]
        kinds = [
            tuple(float(column[0]) for column in vars(kind).values()) for kind in stages(config, one_layout(layout, 8))
        ]
        assert kinds[0] == expected[0] and kinds[-1] == expected[-1] and set(kinds) <= set(expected)
        # Of anything that grows with what is held, the maximum over the kinds is the maximum over all ranks.
        for weigh in ((1, 0, 0, 0, 0), (1, 1, 0, 3, 0), (2, 9, 5, 0, 1), (0, 1, 0, 0, 4), (0, 0, 0, 0, 1)):

            def amount(one: tuple[float, ...], weigh: tuple[int, ...] = weigh) -> float:
                return float(np.dot(weigh, [one[0] - one[1], *one[1:]]))

            assert max(map(amount, kinds)) == max(map(amount, expected))


@given(config=models, size=sizes)
def test_all_ranks_together_have_all_parameters(config: ModelConfig, size: tuple[int, int]) -> None:
    pp, vpp = size
    whole = model_sizes(config)
    for first, last in cuts(config, pp, vpp, head=True):
        total = 0.0
        for rank, parts in enumerate(stage_layers(of(config, pp, vpp, first, last), config.num_layers)):
            held = {layer for part in parts for layer in part}
            values = (len(held), len(held & config.moe_layers), rank == 0, rank == pp - 1, 1)
            total += sum(Stage(*map(float, values)).parameters(whole))
        copies = whole.embedding if config.tied_embeddings and pp > 1 else 0.0
        assert total == pytest.approx(whole.total + copies)


@given(pp=st.integers(2, 16), vpp=st.integers(1, 4), data=st.data())
def test_micro_batches_alive_are_those_of_megatrons_schedule(pp: int, vpp: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, pp - 1))

    class Group:
        def size(self) -> int:
            return pp

        def rank(self) -> int:
            return rank

    class Messages:
        pp_group, virtual_pipeline_model_parallel_size = Group(), vpp if vpp > 1 else None

    # So many of the rank's virtual stages go forward before the first goes backward, and one more with it.
    _, _, warmup, _ = get_pp_rank_microbatches(1000 * pp, vpp, pp, p2p_communicator=Messages())
    assert alive(rank, pp, vpp) == pytest.approx((warmup + 1) / vpp)


def test_choices_of_different_cuts_are_told_apart() -> None:
    config = deep(61, 3)
    each = [
        one_layout(layout, 4096)
        for layout in (
            Layout(world_size=8),
            Layout(pp=8, first_stage_layers=7, last_stage_layers=6, world_size=8),
            Layout(pp=2, first_stage_layers=31, world_size=8),
        )
    ]
    both = Layouts(*(np.concatenate(column) for column in zip(*(vars(one).values() for one in each), strict=True)))
    kinds = stages(config, both)
    assert np.max([kind.layers for kind in kinds], axis=0).tolist() == [61, 8, 31]
    assert np.max([kind.moe_layers for kind in kinds], axis=0).tolist() == [58, 8, 30]
    assert kinds[0].alive.tolist() == [1, 8, 2]


@given(
    num_layers=st.integers(4, 64),
    dense=st.integers(0, 70),
    pp=st.sampled_from([2, 4, 8]),
    vocab=st.sampled_from([100, 50_000]),
    head=st.booleans(),
)
def test_a_pass_takes_what_its_slowest_rank_needs_and_once_what_all_others_do(
    num_layers: int, dense: int, pp: int, vocab: int, head: bool
) -> None:
    config, cluster = deep(num_layers, dense, vocab), make_cluster("H100", 2)
    work = workload(config)
    for first, last in cuts(config, pp, 1, head=head):
        layout = replace(of(config, pp, 1, first, last), world_size=16)
        choice = one_layout(layout, 4096)
        assigned = batches(work.samples, work, choice)
        forward, _, _ = micro_batch(config, choice, assigned.tokens, work, cluster, head=head)
        done = [0.0] * (int(assigned.count[0]) + 1)
        for rank, (layers,) in enumerate(stage_layers(layout, num_layers)):
            moe = len(config.moe_layers.intersection(layers))
            needs = forward.total_on(Stage(len(layers), moe, float(rank == 0), float(rank == pp - 1), 1.0))[0]
            for micro in range(1, len(done)):
                # Each micro-batch waits for the rank before and for the one before it on this rank.
                done[micro] = max(done[micro], done[micro - 1] if micro > 1 else 0.0) + needs
        seconds = score_seconds(config, choice, work, cluster, head=head)
        assert seconds.work[0] == pytest.approx(done[-1])


def test_virtual_stages_shorten_the_wait_and_hold_more() -> None:
    cluster, work = make_cluster("H100", 4), workload(LLAMA_7B, mini_batches=1)
    plain, twice = (one_layout(Layout(pp=4, vpp=vpp, world_size=8), 4096) for vpp in (1, 2))
    once, interleaved = (update_seconds(LLAMA_7B, choice, work, cluster) for choice in (plain, twice))
    assert interleaved.bubble[0] == pytest.approx(once.bubble[0] / 2, rel=0.01)
    assert interleaved.pipeline[0] == pytest.approx(once.pipeline[0] * 2)
    held, more = (role_bytes(LLAMA_7B, choice, 2, Role(trained=True, head=True)) for choice in (plain, twice))
    # 2 x 3 + 4 + 1 virtual stages in place of 4 whole ones.
    assert more.activations[0] / held.activations[0] == pytest.approx(11 / 8, rel=0.02)
    assert more.state[0] == held.state[0]


def test_micro_batches_that_fill_a_round_of_virtual_stages_are_launched() -> None:
    cluster, work = make_cluster("H100", 4), workload(LLAMA_7B, mini_batches=1)
    choice = one_layout(Layout(pp=8, vpp=2, world_size=32), 4096)
    count = int(batches(work.samples, work, choice).count[0])
    assert count % 8
    with_fillers, plain = (
        update_seconds(LLAMA_7B, replace(choice, vpp=np.array([vpp])), work, cluster) for vpp in (2, 1)
    )
    assert with_fillers.launch[0] - plain.launch[0] == pytest.approx(-count % 8 * 3 * 4 * cluster.rates.layer_s)


def test_the_space_of_a_model_whose_layers_nothing_divides_has_every_pipeline() -> None:
    config = deep(61, 3)
    found = layouts(Space(), config, (128,), 8, (4096,), most_dp=128, trained=True, head=True)
    assert set(found.pp) == {1, 2, 4, 8, 16}
    uneven = found.take(found.pp > 1)
    assert np.all((uneven.first_layers > 0) & (uneven.last_layers > 0))
    assert np.all(uneven.vpp == 1), "61 is odd: two virtual stages cannot have it"
