import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.errors import UserError
from megarl.core.layout import Layout, Place, dense_rank, dp_rank, expert_rank, is_lead, place, stage_layers

SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout whose axes fit its ranks."""
    tp, cp, pp, dp = (draw(SIZES) for _ in range(4))
    stage = tp * cp * dp
    etp = draw(st.sampled_from([size for size in range(1, stage + 1) if stage % size == 0]))
    ep = draw(st.sampled_from([size for size in range(1, stage // etp + 1) if stage // etp % size == 0]))
    return Layout(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, world_size=stage * pp)


def test_tensor_parallel_ranks_are_neighbours_and_pipeline_ranks_far_apart():
    layout = Layout(tp=2, pp=2, cp=2, world_size=16)
    assert layout.dp == 2
    assert place(0, layout) == Place(tp=0, cp=0, dp=0, pp=0, etp=0, ep=0, edp=0)
    assert [place(rank, layout).tp for rank in range(5)] == [0, 1, 0, 1, 0]
    assert [place(rank, layout).cp for rank in range(5)] == [0, 0, 1, 1, 0]
    assert [dp_rank(rank, layout) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [place(rank, layout).pp for rank in (7, 8)] == [0, 1]


def test_experts_have_axes_of_their_own():
    layout = Layout(tp=2, ep=4, world_size=8)
    assert (layout.dp, layout.edp) == (4, 2)
    assert [place(rank, layout).ep for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [place(rank, layout).edp for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


@given(layouts())
def test_places_are_unique_and_lead_back_to_their_rank(layout):
    for rank in range(layout.world_size):
        where = place(rank, layout)
        assert dense_rank(layout, tp=where.tp, cp=where.cp, dp=where.dp, pp=where.pp) == rank
        assert expert_rank(layout, etp=where.etp, ep=where.ep, edp=where.edp, pp=where.pp) == rank


@given(layouts())
def test_every_shard_has_one_lead_which_has_logits(layout):
    leads = [rank for rank in range(layout.world_size) if is_lead(rank, layout)]
    assert [dp_rank(rank, layout) for rank in leads] == list(range(layout.dp))
    assert {place(rank, layout).pp for rank in leads} == {layout.pp - 1}


def test_layers_are_dealt_to_stages():
    assert stage_layers(Layout(), 3) == ((range(3),),)
    assert stage_layers(Layout(pp=2, world_size=2), 4) == ((range(2),), (range(2, 4),))
    interleaved = stage_layers(Layout(pp=2, vpp=2, world_size=2), 8)
    assert interleaved == ((range(2), range(4, 6)), (range(2, 4), range(6, 8)))


def test_first_and_last_stages_may_be_of_another_size():
    uneven = stage_layers(Layout(pp=4, first_stage_layers=1, last_stage_layers=3, world_size=4), 8)
    assert [len(stage[0]) for stage in uneven] == [1, 2, 2, 3]
    assert stage_layers(Layout(pp=2, first_stage_layers=1, world_size=2), 3) == ((range(1),), (range(1, 3),))
    both = stage_layers(Layout(pp=2, vpp=2, first_stage_layers=2, world_size=2), 6)
    assert both == ((range(1), range(3, 4)), (range(1, 3), range(4, 6)))


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (Layout(pp=2, world_size=2), 3),
        (Layout(pp=2, vpp=2, world_size=2), 6),
        (Layout(pp=4, world_size=4), 3),
        (Layout(pp=2, first_stage_layers=1, last_stage_layers=1, world_size=2), 3),
        (Layout(pp=4, first_stage_layers=2, world_size=4), 4),
    ],
)
def test_layers_that_cannot_be_dealt_are_refused(layout, layers):
    with pytest.raises(UserError, match=f"{layers} layers cannot be assigned to {layout.pp} pipeline ranks"):
        stage_layers(layout, layers)


@given(layouts(), st.integers(1, 3))
def test_every_layer_is_on_one_stage(layout, each):
    stages = stage_layers(layout, each * layout.pp)
    assert sorted(layer for stage in stages for chunk in stage for layer in chunk) == list(range(each * layout.pp))


def test_padding_follows_context_and_sequence_parallel():
    assert Layout().sequence_multiple == 1
    assert Layout(cp=2, world_size=2).sequence_multiple == 4
    assert Layout(tp=2, sequence_parallel=True, world_size=2).sequence_multiple == 2
    assert Layout(tp=2, cp=2, sequence_parallel=True, world_size=4).sequence_multiple == 8


def test_a_layout_says_itself():
    assert str(Layout()) == "one rank"
    assert (
        str(Layout(tp=2, pp=2, sequence_parallel=True, first_stage_layers=1, world_size=8)) == "tp2 pp2 sp first1 dp2"
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 4, "world_size": 6}, r"tp 4 x cp 1 x pp 1 = 4 does not divide 6 devices.*\[1, 2, 3, 6\]"),
        ({"ep": 4, "world_size": 6}, r"etp 1 x ep 4 x pp 1 = 4 does not divide 6 devices"),
        ({"tp": 0, "world_size": 2}, "at least 1; got tp=0"),
        ({"vpp": 2, "world_size": 2}, "need pipeline parallel"),
        ({"sequence_parallel": True, "world_size": 2}, "set tp to 2 or more"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        Layout(**sizes)


def test_layers_that_were_fixed_are_named_before_the_first_colon() -> None:
    """Who shows what stands against a layout takes the sentence up to there."""
    with pytest.raises(UserError) as refused:
        stage_layers(Layout(pp=2, first_stage_layers=2, world_size=2), 2)
    assert (
        str(refused.value)
        .split(":", maxsplit=1)[0]
        .endswith("2 pipeline ranks of 1 virtual stages with 2 on the first")
    )
