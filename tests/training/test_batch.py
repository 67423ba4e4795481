import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.layout import Layout
from megarl.training.batch import PADDING, cut_sequences, filler, joined_top, split_top, to_device
from tests.training.samples import examples, shards


def bounds(lengths):
    return np.cumsum([0, *lengths]).astype(np.int32)


def test_one_rank_holds_the_sequences_as_they_are():
    cut = cut_sequences(bounds([3, 0, 2]), Layout())
    assert cut.cu_seqlens.tolist() == [0, 3, 3, 5]
    assert [source.tolist() for source in cut.sources] == [[0, 1, 2, 3, 4]]


def test_sequence_parallel_pads_each_sequence():
    cut = cut_sequences(bounds([3, 2]), Layout(tp=2, sequence_parallel=True, world_size=2))
    assert cut.cu_seqlens.tolist() == [0, 4, 6]
    assert cut.sources[0].tolist() == [0, 1, 2, PADDING, 3, 4]


def test_context_ranks_hold_first_and_last_chunks():
    cut = cut_sequences(bounds([8, 5]), Layout(cp=2, world_size=2))
    assert cut.cu_seqlens.tolist() == [0, 8, 16]
    assert cut.sources[0].tolist() == [0, 1, 6, 7, 8, 9, PADDING, PADDING]
    assert cut.sources[1].tolist() == [2, 3, 4, 5, 10, 11, 12, PADDING]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2]),
)
def test_a_column_comes_back_whole(lengths, cp, tp):
    layout = Layout(tp=tp, cp=cp, sequence_parallel=tp > 1, world_size=tp * cp)
    cut = cut_sequences(bounds(lengths), layout)
    assert all(len(source) == cut.cu_seqlens[-1] / cp for source in cut.sources)
    assert all(size % layout.sequence_multiple == 0 for size in np.diff(cut.cu_seqlens))
    column = np.arange(sum(lengths), dtype=np.float32) + 1
    parts = [np.where(source == PADDING, np.nan, column[source]) for source in cut.sources]
    assert cut.gather(parts, sum(lengths)).tolist() == column.tolist()


def test_padding_counts_for_nothing(device):
    [shard], [columns] = shards([examples([3, 5], 50)])
    micro = shard.mini_batches[0].micro_batches[0]
    given_columns = {name: column[0][0] for name, column in columns.items()}
    layout = Layout(cp=2, world_size=2)
    parts = [to_device(micro, given_columns, device, layout, rank) for rank in range(2)]
    assert [part.num_tokens for part in parts] == [6, 6]
    for name in ("mask", "weights", "rollout_logprobs"):
        whole = {"mask": micro.loss_mask}.get(name, getattr(micro, name, None))
        assert sum(getattr(part, name).sum().item() for part in parts) == pytest.approx(float(whole.sum()), rel=1e-6)
    # The second sequence, of 5 tokens padded to 8: its chunks 0 and 3 are on rank 0, and the last is padding.
    assert parts[0].positions.tolist() == [0, 0, 0, 1, 0, 0]
    assert parts[1].positions.tolist() == [1, 2, 2, 3, 4, 0]
    assert parts[0].tokens[2:4].tolist() == micro.tokens[3:5].tolist()


def test_a_filler_has_no_weight(device):
    batch = filler(
        device,
        Layout(tp=2, cp=2, sequence_parallel=True, world_size=4),
        {"advantages": torch.ones(9), "teacher_top": torch.ones(9, 5)},
    )
    assert batch.num_tokens == 4
    assert batch.cu_seqlens.tolist() == [0, 8]
    assert not batch.mask.any()
    assert not batch.weights.any()
    shapes = {name: tuple(column.shape) for name, column in batch.columns.items()}
    assert shapes == {"advantages": (4,), "teacher_top": (4, 5)} and not any(map(torch.any, batch.columns.values()))
    assert batch.top_ids.shape == (4, 2)


def test_several_numbers_of_a_token_go_where_it_goes_and_come_back(device):
    layout, wide = Layout(cp=2, world_size=2), np.arange(16, dtype=np.float32).reshape(8, 2)
    [shard], _ = shards([examples([3, 5], 50)])
    [micro] = shard.mini_batches[0].micro_batches
    parts = [to_device(micro, {"wide": wide}, device, layout, rank).columns["wide"].cpu().numpy() for rank in (0, 1)]
    assert parts[0].tolist() == [[0, 1], [0, 0], *wide[[3, 4]].tolist(), [0, 0], [0, 0]]
    assert np.array_equal(cut_sequences(micro.cu_seqlens, layout).gather(parts, 8), wide)


def test_likeliest_labels_travel_with_their_log_probs_and_ids_are_exact(device):
    ids = torch.tensor([[2**24 - 1, 0], [7, 151_935]], device=device)
    logprobs = torch.tensor([[-0.25, -2.0, -3.0], [-1.0, -1.5, -0.75]], device=device)
    back = split_top(joined_top(ids, logprobs))
    assert torch.equal(back[0], ids) and torch.equal(back[1], logprobs)


def test_a_routing_takes_two_bytes_a_choice_on_the_device(device):
    """Those of a whole mini-batch are there at once: in a model of 58 layers and 8 experts a token 928 bytes each."""
    [shard], _ = shards([examples([3, 5], 50)])
    [micro] = shard.mini_batches[0].micro_batches
    routing = np.arange(16, dtype=np.int16).reshape(8, 2)
    batch = to_device(
        dataclasses.replace(micro, routing=routing), {}, device, Layout(tp=2, sequence_parallel=True, world_size=2), 0
    )
    assert batch.routing.element_size() == 2
    assert batch.routing.tolist() == [*routing[:3].tolist(), [PADDING] * 2, *routing[3:].tolist(), [PADDING] * 2]
