"""The benchmark of the algorithms runs, on little, and its two sides agree. Its figures are not judged here."""

from __future__ import annotations

import pytest

from bench.algorithms import TARGETS_MS, Cost, make_tokens, measure, show


def test_measures_everything_that_has_a_target() -> None:
    costs = measure(num_tokens=5000, num_groups=8, repeats=2)
    assert costs.keys() >= TARGETS_MS.keys()
    assert all(cost.cpu_ms >= 0 and cost.wall_ms > 0 for cost in costs.values())


def test_a_missed_target_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    good = {name: Cost(target, target, 1.0) for name, target in TARGETS_MS.items()}
    assert show(good)
    assert not show({**good, "GAE": Cost(10.1, 10.1, 1.0)})
    assert "GAE" in capsys.readouterr().out


def test_sequences_fill_the_tokens() -> None:
    tokens = make_tokens(5000, masked=True)
    assert tokens.cu_seqlens[-1] == len(tokens.mask) == 5000
    assert 0.5 < tokens.mask.mean() < 0.85
