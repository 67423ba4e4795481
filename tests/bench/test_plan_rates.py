"""The search for other rates: what it draws, and how it counts."""

from __future__ import annotations

import random

from bench.plan import FINDINGS, NODE_BYTES_S, their_cluster
from bench.plan_rates import MICRO_TOKENS, NETWORK, RANGES, SPACES, Assumed, draw, outcome, step


def test_draws_are_within_their_ranges_and_steps_change_two_rates_at_most() -> None:
    numbers = random.Random(0)
    for _ in range(50):
        best, new = draw(numbers), draw(numbers)
        near = step(numbers, best)
        for assumed in (best, new, near):
            assert all(low <= assumed.rates[name] <= high for name, (low, high) in RANGES.items())
            assert NETWORK[0] <= assumed.network <= NETWORK[1]
            assert assumed.micro_tokens in MICRO_TOKENS and assumed.space in SPACES
        assert sum(near.rates[name] != best.rates[name] for name in RANGES) <= 2


def test_our_own_rates_reproduce_what_the_page_says() -> None:
    rates = vars(their_cluster(16).rates)
    own = Assumed({name: rates[name] for name in RANGES}, 1.0, MICRO_TOKENS[-1], "all")
    found = outcome(own)
    assert their_cluster(16).device.between_bytes_s == NODE_BYTES_S / 8
    assert found.agree + len(found.missed) == sum(map(len, FINDINGS.values())) == 16
    assert found.agree == 13
    assert all(ratio > 1 for ratio in found.missed.values())
