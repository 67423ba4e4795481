"""What all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from megarl.core.loading import without_collection

# No test asks the real hub, also not where a path that leads nowhere looks like a name on it.
os.environ["HF_HUB_OFFLINE"] = "1"

# Ray has its workers, and so ranks and servers, stand back for everybody else: beside other tests they would get nothing done.
os.environ.update(RAY_worker_niceness="0")

if TYPE_CHECKING:
    from tests.support.forked_ranks import Ranks
    from tests.support.served import Pool

# No deadline for a single example: on a busy machine the first one, which warms caches, would fail by the clock alone.
settings.register_profile("megarl", deadline=None)
settings.load_profile("megarl")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported for the tests stays to the end: nobody looks for garbage in it."""
    with without_collection():
        found = yield
        gc.freeze()
    return found


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """One real SGLang server with its router, for all tests that leave it as they found it."""
    from tests.support.served import serving

    with serving(tmp_path_factory.mktemp("served")) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Starts several ranks, for all tests that look at what they compute."""
    from tests.support.forked_ranks import forked_ranks

    with forked_ranks() as made:
        yield made
