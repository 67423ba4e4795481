"""One process as a whole Megatron job, for the tests that build models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from megarl.core.layout import Layout
from megarl.core.platform import Platform
from megarl.models.bootstrap import prepare_megatron
from tests.support.platforms import chosen

if TYPE_CHECKING:
    from megarl.training.parallel import Groups


def pytest_configure() -> None:
    """Megatron meets the platform before any test file imports it."""
    prepare_megatron(chosen())


@pytest.fixture(scope="module")
def one_rank(platform: Platform) -> Iterator[Groups]:
    """The groups of one rank, active while the module's tests run."""
    from megarl.core.ports import free_port
    from megarl.training.parallel import close_ranks, join_ranks, make_groups

    join_ranks(0, 1, platform, "127.0.0.1", free_port(), timeout_s=60)
    groups = make_groups(Layout(), timeout_s=60, seed=1)
    with groups.active():
        yield groups
    close_ranks()
