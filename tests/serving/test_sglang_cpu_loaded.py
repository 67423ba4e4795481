"""A process that has loaded SGLang as a CPU's server has: what is in it, and that its layers have SGLang's numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from megarl.core.platform import get_platform

# In processes of their own: SGLang's modules stay where they were imported.
OF_SERVERS = (
    "norms",
    "linears",
    "names",
    "penalties",
    "scales",
    "sampler",
    "attention",
    "ranks",
    "kv_scales",
    "nccl",
    "images",
)
MODULES = [f"tests.serving.sglang_{name}" for name in OF_SERVERS]
NORMS, LINEARS, NAMES, PENALTIES, SCALES, SAMPLER, ATTENTION, RANKS, KV_SCALES, NCCL, IMAGES = MODULES


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the process says of itself, and what went wrong in the copies of it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.serving.alone", *MODULES],
        env={**os.environ, **get_platform("cpu").env},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_a_server_loads_no_more_than_it_serves_with(found: dict[str, Any]) -> None:
    """Megatron and torch's compiler are installed beside it, and seconds of every start."""
    assert found["loaded"]["unwanted"] == []


@pytest.mark.slow
def test_the_loaded_server_has_one_thread_and_its_children_are_copies(found: dict[str, Any]) -> None:
    # A copy of a process with threads could wait for ever for what one of them held.
    assert (found["loaded"]["children"], found["loaded"]["threads"]) == ("fork", 1)


def test_norms_and_rotary_positions_have_the_numbers_of_sglang_s_own_code(found: dict[str, Any]) -> None:
    assert found[NORMS] == ""


def test_products_are_those_of_the_weights_last_loaded(found: dict[str, Any]) -> None:
    assert found[LINEARS] == ""


def test_ranks_of_a_server_on_cpus_look_for_no_nccl(found: dict[str, Any]) -> None:
    """A build of torch for CUDA has one, with which a server of several ranks would end as it starts."""
    assert found[NCCL] == ""


def test_a_server_of_a_model_that_sees_loads_nothing_of_other_models_images(found: dict[str, Any]) -> None:
    assert found[IMAGES] == ""


def test_shared_memory_of_a_server_is_named_as_who_starts_it_expects(found: dict[str, Any]) -> None:
    """A server that is killed as it starts leaves it, and no process is there to ask."""
    assert found[NAMES] == ""


def test_a_repetition_penalty_is_computed_at_once(found: dict[str, Any]) -> None:
    """The first request that asks for one waited ten seconds of a core for torch's compiler."""
    assert found[PENALTIES] == ""


def test_a_deterministic_server_on_blackwell_is_told_its_attention(found: dict[str, Any]) -> None:
    assert found[ATTENTION] == ""


def test_a_server_that_waits_for_fp8_on_blackwell_leaves_its_scales_as_they_come(found: dict[str, Any]) -> None:
    assert found[SCALES] == ""


def test_a_seeded_token_does_not_depend_on_what_others_of_the_batch_ask_for(found: dict[str, Any]) -> None:
    """A greedy answer beside it had a sample draw another first token."""
    assert found[SAMPLER] == ""


def test_where_requests_of_a_batch_differ_those_that_filter_nothing_can_be_drawn_in_the_same_way(
    found: dict[str, Any],
) -> None:
    """On CUDA, where the sampler is SGLang's own."""
    assert found[RANKS] == ""


def test_scales_of_the_cache_that_nobody_sends_are_none(found: dict[str, Any]) -> None:
    """A server that has slept has some in memory that was not written."""
    assert found[KV_SCALES] == ""
