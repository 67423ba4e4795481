"""What the tests of benchmarks share."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

import pytest


@pytest.fixture(scope="session")
def loaded() -> ForkServerContext:
    """Makes copies of a process that has loaded Megatron: no seconds of these runs are looked at."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.loaded"])
    return context
