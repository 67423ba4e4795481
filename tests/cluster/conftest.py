"""One real local Ray for a module's tests; a process can only be in one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import megarl.cluster  # noqa: F401  (before a test file imports ray)
from megarl.core.platform import Platform, num_local_devices

if TYPE_CHECKING:
    from megarl.cluster.runtime import Runtime

NUM_DEVICES = 4


@pytest.fixture(scope="module")
def runtime(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    from megarl.cluster.runtime import Runtime

    folder: Path = tmp_path_factory.mktemp("run")
    there = num_local_devices(platform)
    with Runtime.start(platform, folder, num_devices=NUM_DEVICES if there is None else there) as runtime:
        yield runtime
