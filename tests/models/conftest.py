"""One process as a whole Megatron job, for the tests that build models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megarl.core.platform import get_platform
from megarl.models.bootstrap import prepare_megatron

prepare_megatron(get_platform("cpu"))


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    from megarl.rollout.process import free_port
    from megarl.core.layout import Layout
    from megarl.training.parallel import close_parallel, init_parallel

    init_parallel(0, Layout(), get_platform("cpu"), "127.0.0.1", free_port(), timeout_s=60, seed=1)
    yield
    close_parallel()
