"""The benchmarks run, at sizes that prove nothing, and what decides on their exit codes is right."""

import json
import os
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import megarl.cluster  # noqa: F401  (before a benchmark imports ray)
from bench import (
    agent_load,
    bare_speed,
    checkpoint_memory,
    collector,
    journal,
    layer_memory,
    load,
    logprob_memory,
    packing,
    rollout_simulation,
    sandbox,
)
from bench.support import measure
from bench.support.measure import alternate, in_fresh_process, in_fresh_ranks, peak, ratios, summary
from bench.support.training import QUICK, micro_batches, to_shard
from tests.bench.fresh import facts, rank_facts
from tools import make_tiny_model


@pytest.mark.slow
@pytest.mark.parametrize(
    "bench",
    [
        agent_load,
        bare_speed,
        checkpoint_memory,
        collector,
        journal,
        layer_memory,
        load,
        logprob_memory,
        packing,
        rollout_simulation,
        sandbox,
    ],
    ids=lambda bench: bench.__name__,
)
def test_the_benchmark_runs_and_its_sides_agree(bench, loaded: ForkServerContext, monkeypatch, tmp_path):
    if bench is not layer_memory:  # it replaces parts of torch before Megatron is loaded
        monkeypatch.setattr(measure, "get_context", lambda _: loaded)
    monkeypatch.setattr(agent_load, "multiprocessing", SimpleNamespace(get_context=lambda _: loaded))
    # The tool in this process: another would load torch and transformers anew.
    monkeypatch.setattr(agent_load, "call", lambda tool, option, folder: make_tiny_model.main(out=Path(folder)))
    bench.main(quick=True, out=tmp_path)  # exits where the numbers of its sides differ
    [path] = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert path.stem == bench.__name__.removeprefix("bench.")
    assert set(result["host"]) == {"date", "machine", "cpu", "cores", "load_average", "packages"}


@pytest.mark.slow
def test_processes_are_fresh_and_have_their_threads():
    assert in_fresh_process(2, facts) == (2, "2")
    ranks = in_fresh_ranks(2, rank_facts, "x")
    assert [rank for rank, _, _ in ranks] == ["x0", "x1"]
    assert len({os.getpid(), *(pid for _, pid, _ in ranks)}) == 3
    assert all(threads == 1 for _, _, threads in ranks)


def test_a_peak_counts_what_is_gone_when_the_block_ends():
    size = 200 * 2**20
    with peak() as held:
        block = np.ones(size, np.uint8)
        del block
    assert 0.98 * size < held.bytes < 1.1 * size
    with peak() as held:
        small = np.ones(2**20, np.uint8)
    assert held.bytes < 0.1 * size, "the earlier peak is forgotten"
    del small


def test_sides_take_turns_and_the_first_turn_does_not_count():
    calls = []
    seconds = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=2)
    assert calls == ["a", "b"] * 3
    assert {side: len(each) for side, each in seconds.items()} == {"a": 2, "b": 2}
    assert ratios({"a": [6.0, 8.0], "b": [3.0, 2.0]}, "a", "b") == [2.0, 4.0]
    assert summary([3.0, 1.0, 2.0]) == {"median": 2.0, "lowest": 1.0, "highest": 3.0}


def test_padding_changes_lengths_and_nothing_that_is_learned():
    micros = micro_batches(QUICK)
    wide = [[packing.padded(each, 70) for each in micro] for micro in micros]
    (packed, columns), (padded, wide_columns) = to_shard(micros), to_shard(wide)
    assert padded.num_tokens == 70 * QUICK.sequences > packed.num_tokens
    for one, other in zip(packed.mini_batches[0].micro_batches, padded.mini_batches[0].micro_batches, strict=True):
        real = other.weights > 0
        assert np.array_equal(other.weights[real], one.weights[one.weights > 0])
        assert np.array_equal(other.labels[real], one.labels[one.weights > 0])
    for name, column in columns.items():
        assert np.sum(np.concatenate(wide_columns[name][0])) == pytest.approx(
            np.sum(np.concatenate(column[0])), rel=1e-5
        )


def test_micro_batches_reach_the_engine_as_they_were_cut():
    micros = micro_batches(QUICK)
    shard, _ = to_shard(micros)
    for micro, packed in zip(micros, shard.mini_batches[0].micro_batches, strict=True):
        assert np.array_equal(np.concatenate([each.tokens for each in micro]), packed.tokens)


def test_a_memory_row_needs_right_numbers_and_the_lower_peak():
    errors = {"logprobs": 1e-6, "entropy": 1e-6, "gradient": 5e-3}
    good = {"dtype": "bfloat16", "megarl": {"errors": errors}, "peak_ratio": 0.3}
    assert logprob_memory.is_good(good)
    assert not logprob_memory.is_good({**good, "dtype": "float32"})
    assert not logprob_memory.is_good({**good, "peak_ratio": 1.0})
    assert not logprob_memory.is_good({**good, "megarl": {"errors": {**errors, "entropy": 1e-4}}})


@pytest.mark.parametrize(
    ("state", "peak_over_share", "load_over_cat", "read_over_cat", "good"),
    [
        ("warm", 1.09, 0.5, 0.1, True),
        ("warm", 1.1, 2, 2, False),
        ("warm", 1, 0.49, 2, False),
        ("cold", 1, 0.5, 0.5, True),
        ("cold", 1, 0.49, 2, False),
        ("cold", 1, 2, 0.49, False),
    ],
)
def test_a_load_row_needs_memory_and_speed(state, peak_over_share, load_over_cat, read_over_cat, good):
    speeds = {"load_over_cat": {"median": load_over_cat}, "read_over_cat": {"median": read_over_cat}}
    assert load.is_good({"state": state, "peak_over_share": peak_over_share, **speeds}) is good
