"""Whole parameters of an optimizer's state, each on one rank: by hand, by properties, and equal to what megatron-core gathers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.training.state_shares import STATES, Piece, Place, owners, pieces, rounds
from tests.training.share_ranks import LAYOUTS


def test_the_largest_first_each_to_whom_has_least():
    assert owners([3, 10, 4, 4, 1], 2) == [1, 0, 1, 1, 0]
    assert owners([5, 5, 5], 4) == [0, 1, 2]
    assert owners([], 3) == []


def test_a_parameter_is_cut_where_a_rank_s_part_of_its_bucket_ends():
    # Two buckets of 8 elements, of which two ranks hold 4 each; the second begins behind the first.
    places = [Place(0, 3, 0, 8), Place(3, 7, 0, 8), Place(8, 15, 8, 8)]
    assert pieces(places, 2) == [
        Piece(0, 0, 3, holder=0, owner=1),
        Piece(1, 0, 1, holder=0, owner=1),
        Piece(1, 1, 4, holder=1, owner=1),
        Piece(2, 0, 4, holder=0, owner=0),
        Piece(2, 4, 7, holder=1, owner=0),
    ]


def test_in_a_round_each_rank_sends_its_part_at_most():
    cut = [Piece(0, 0, 3, 0, 1), Piece(1, 0, 1, 0, 1), Piece(1, 1, 4, 1, 1)]
    assert rounds(cut, 2, most=4) == [
        [Piece(0, 0, 2, 0, 1), Piece(1, 1, 3, 1, 1)],
        [Piece(0, 2, 3, 0, 1), Piece(1, 0, 1, 0, 1), Piece(1, 3, 4, 1, 1)],
    ]
    assert rounds([], 2) == []


@given(
    st.integers(1, 6),
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(1, 50),
)
def test_every_element_goes_once_from_who_holds_it(ranks, buckets, most):
    places, at = [], 0
    for sizes in buckets:
        offset, numel = at, -(-sum(sizes) // ranks) * ranks
        for size in sizes:
            places.append(Place(at, at + size, offset, numel))
            at += size
        at = offset + numel
    planned = rounds(pieces(places, ranks), ranks, most)
    found = {}
    for each in planned:
        sent = [0] * ranks
        for piece in each:
            sent[piece.holder] += piece.numel
            for element in range(piece.start, piece.stop):
                assert (piece.parameter, element) not in found
                found[piece.parameter, element] = piece.holder
        assert max(sent) <= max(1, most // ranks)
    for index, place in enumerate(places):
        for element in range(place.stop - place.start):
            assert found[index, element] == (place.start + element - place.offset) // (place.numel // ranks)
    assert len({(piece.parameter, piece.owner) for each in planned for piece in each}) == len(places)


@pytest.fixture(scope="module")
def observed(rank, ranks, tmp_path_factory):
    """Of four ranks, by layout and rank; and where they wrote. rank: any, which has a free port."""
    from tests.training.invariance import write_models

    root = tmp_path_factory.mktemp("shares")
    write_models(root)
    for number in range(len(LAYOUTS)):
        for name in (str(number), f"{number}.upstream"):
            (root / name).mkdir()
    assert ranks.run("tests.training.share_ranks", 4, 4, rank.free_port(), root, log=root / "ranks.log") == ""
    found = [torch.load(root / f"rank{index}.pt", weights_only=False) for index in range(4)]
    return root, list(zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=[f"{model} {sizes}" for model, sizes in LAYOUTS])
class TestFourRanks:
    def test_what_is_saved_is_what_megatron_gathers(self, observed, number):
        from megarl.training.checkpoint_files import stored_tensors
        from megarl.training.manifest import read_manifest

        """A float32 model's weights are its optimizer's. Megatron's own gathering, of 0.16.1, is right where no bucket is padded
        before another: those of tied embeddings under pipeline parallel are, and their states came from the wrong place."""

        root, _ = observed
        entries = read_manifest(root / str(number)).tensors
        found = dict(stored_tensors(root / str(number), entries))
        states = {name: entry for name, entry in entries.items() if name.startswith("optimizer.state.")}
        weights = entries.keys() - states.keys()
        assert {f"optimizer.state.{key}.{name}" for key in STATES for name in weights} == states.keys()
        assert [name for name in weights if not torch.equal(found[f"optimizer.state.param.{name}"], found[name])] == []
        assert all(found[name].any() for name in states)
        if LAYOUTS[number] != ("tied", {"pp": 2}):
            theirs = dict(stored_tensors(root / f"{number}.upstream", states))
            assert [name for name, tensor in theirs.items() if not torch.equal(tensor, found[name])] == []

    def test_a_loaded_state_is_the_saved_one_and_steps_go_on(self, observed, number):
        _, layouts = observed
        for of_rank in layouts[number]:
            assert of_rank["kept"] and of_rank["loaded"] and of_rank["same step"]

    def test_every_rank_takes_a_fair_part(self, observed, number):
        """Nobody has more than the mean over the ranks that share it, and the largest parameter."""
        _, layouts = observed
        for of_rank in layouts[number]:
            assert max(share.ranks for share in of_rank["shares"]) > 1
            for share in of_rank["shares"]:
                assert share.own <= share.total / share.ranks + share.largest
