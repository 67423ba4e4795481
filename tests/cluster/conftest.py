"""One real local Ray for a module's tests; a process can only be in one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cluster.runtime import Runtime
from megarl.core.platform import get_platform


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder: Path = tmp_path_factory.mktemp("run")
    with Runtime.start(get_platform("cpu"), folder, num_devices=4) as runtime:
        yield runtime
