"""The copy of running requests' keys and values: whatever comes and goes, attention is that of each request alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from megarl.serving.sglang_cpu_rows import Copy, Decoder, Fill, Rows, attend_with_sinks, even_runs

HEADS, KV_HEADS, DIM, SLOTS, REQUESTS = 6, 2, 8, 8192, 8


class Pool:
    """Keys and values by slot, as SGLang keeps them; slots are taken in no order."""

    def __init__(self) -> None:
        self.keys, self.values = torch.randn(2, SLOTS, KV_HEADS, DIM)
        self.table = torch.zeros(REQUESTS, 2048, dtype=torch.int32)
        self.free = torch.randperm(SLOTS).tolist()
        self.lengths: dict[int, int] = {}

    def extend(self, request: int, count: int) -> None:
        length = self.lengths.get(request, 0)
        slots = [self.free.pop() for _ in range(count)]
        self.table[request, length : length + count] = torch.tensor(slots, dtype=torch.int32)
        self.lengths[request] = length + count

    def finish(self, request: int) -> None:
        length = self.lengths.pop(request)
        self.free = self.table[request, :length].tolist() + self.free

    def last(self, part: torch.Tensor, requests: list[int]) -> torch.Tensor:
        return torch.stack([part[self.table[each, self.lengths[each] - 1]].flatten() for each in requests])

    def alone(self, request: int, query: torch.Tensor) -> torch.Tensor:
        slots = self.table[request, : self.lengths[request]]
        keys, values = (part[slots].transpose(0, 1)[None] for part in (self.keys, self.values))
        return scaled_dot_product_attention(query[None, :, None], keys, values, scale=0.3, enable_gqa=True)[0, :, 0]


def step(decoder: Decoder, pool: Pool, requests: list[int]) -> bool:
    """One decode step, compared with each request alone; whether the copy had room."""
    for each in requests:
        pool.extend(each, 1)
    begun = decoder.begin(requests, [pool.lengths[each] for each in requests])
    if begun is None:
        return False
    query = torch.randn(len(requests), HEADS, DIM)
    for layer in (0, 3):
        new = (pool.last(part, requests) for part in (pool.keys, pool.values))
        decoder.append(begun, layer, pool.keys, pool.values, pool.table, *new)
        found = decoder.attend(begun, layer, query, 0.3)
        wanted = torch.stack([pool.alone(each, one) for each, one in zip(requests, query, strict=True)])
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    return True


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(0, REQUESTS - 1), st.sampled_from([1, 5, 90, 300])),
        st.tuples(st.just("go"), st.integers(0, REQUESTS - 1)),
        st.tuples(st.just("again"), st.integers(0, REQUESTS - 1)),
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=60)
@given(actions=ACTIONS, most=st.sampled_from([512, 1200, SLOTS]))
def test_attention_is_that_of_each_request_alone(actions, most):
    torch.manual_seed(0)
    decoder, pool = Decoder(most), Pool()
    for kind, *values in actions:
        if kind == "come" and values[0] not in pool.lengths:
            decoder.forget([values[0]])  # its prefill
            pool.extend(values[0], values[1])
        elif kind == "go" and values[0] in pool.lengths:
            pool.finish(values[0])
        elif kind == "again" and values[0] in pool.lengths:
            length = pool.lengths[values[0]]  # sent back to the queue, and prefilled into other slots
            pool.finish(values[0])
            decoder.forget([values[0]])
            pool.extend(values[0], length)
        elif kind == "step" and pool.lengths:
            for _ in range(values[0]):
                step(decoder, pool, list(pool.lengths))


def test_there_is_room_for_as_much_as_the_pool_holds():
    decoder, pool = Decoder(400), Pool()
    pool.extend(0, 199)
    pool.extend(1, 10)
    assert step(decoder, pool, [0, 1])
    assert not step(decoder, pool, [0, 1])  # 2 x 201
    assert step(decoder, pool, [0])


def test_what_is_not_a_number_stays_with_its_request():
    decoder, pool = Decoder(SLOTS), Pool()
    pool.extend(0, 40)
    pool.keys[pool.table[0, 20].item()] = pool.values[pool.table[0, 20].item()] = float("nan")
    begun = decoder.begin([0], [40])
    decoder.append(begun, 0, pool.keys, pool.values, pool.table, *(pool.last(p, [0]) for p in (pool.keys, pool.values)))
    pool.finish(0)
    for request, count in ((1, 10), (2, 30)):
        pool.extend(request, count)
    assert step(decoder, pool, [1, 2])


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_sinks_are_one_more_logit_of_each_head(count, window):
    query, keys, values = torch.randn(count, HEADS, DIM), *torch.randn(2, 9, KV_HEADS, DIM)
    sinks = torch.linspace(-2, 4, HEADS)
    found = attend_with_sinks(query, keys, values, 0.3, sinks, window)
    for token in range(count):
        at = 9 - count + token
        seen = slice(max(0, at - window + 1) if window else 0, at + 1)
        for head in range(HEADS):
            pair = head * KV_HEADS // HEADS
            weights = (keys[seen, pair] @ query[token, head] * 0.3).exp()
            wanted = weights @ values[seen, pair] / (weights.sum() + sinks[head].exp())
            torch.testing.assert_close(found[token, head], wanted)


def test_the_last_row_takes_the_place_of_one_that_ends():
    rows = Rows()
    assert rows.step([7, 3, 5], [4, 9, 2]) == ([0, 1, 2], [Fill(0, 7, 4), Fill(1, 3, 9), Fill(2, 5, 2)])
    assert rows.forget([7, 8]) == [(2, 0)]
    assert rows.step([3, 5], [10, 3]) == ([1, 0], [])
    assert rows.step([3, 5, 7], [11, 6, 1]) == ([1, 0, 2], [Fill(0, 5, 6), Fill(2, 7, 1)])


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ([], []),
        ([5], [(0, 1)]),
        ([5, 60, 69, 70], [(0, 3), (3, 4)]),
        ([1000, 800, 700, 1000], [(0, 2), (2, 3), (3, 4)]),
    ],
)
def test_neighbours_of_about_the_same_length_go_together(lengths, wanted):
    assert list(even_runs(lengths)) == wanted


def test_the_copy_doubles_and_keeps_what_it_holds():
    copy = Copy(10_000)
    assert copy.fits(2, 100)
    assert (copy.num_rows, copy.num_tokens) == (2, 256)
    keys, _ = copy.layer(0, torch.ones(1, KV_HEADS, DIM), torch.ones(1, KV_HEADS, DIM))
    keys[1, :, 150] = 5
    assert copy.fits(3, 400)
    assert (copy.num_rows, copy.num_tokens) == (3, 800)
    grown = copy.layers[0][0]
    assert grown[1, :, 150].eq(5).all()
    assert grown.sum() == 5 * KV_HEADS * DIM
