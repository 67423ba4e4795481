"""What the tests of benchmarks share."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

import pytest

# What several copies would each load: Megatron, the benchmarks that they are of, and the model of their loops.
LOADED = (
    "tests.support.loaded",
    "bench.agent_load",
    "bench.checkpoint_memory",
    "bench.packing",
    "transformers.models.qwen3.modeling_qwen3",
)


@pytest.fixture(scope="session")
def loaded() -> ForkServerContext:
    """Makes copies of a process that has loaded all: no seconds of these runs are looked at."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LOADED))
    return context
