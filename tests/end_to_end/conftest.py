"""A tiny model and task, made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.end_to_end.harness import Driver, start
from tools.make_arithmetic import make_arithmetic
from tools.make_tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("end_to_end")
    make_tiny_model(folder / "model", hidden_size=64)
    make_arithmetic(folder / "data", num_train=64, num_eval=8, num_sft=64)
    return folder


@pytest.fixture
def launch(inputs: Path) -> Iterator[Callable[..., Driver]]:
    """Starts drivers on the inputs, with overrides of the recipe; ends them with the test."""
    with ExitStack() as ended:

        def launched(*overrides: str) -> Driver:
            driver = start(inputs, *overrides)
            ended.callback(driver.end)
            return driver

        yield launched
