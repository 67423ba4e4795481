"""A tiny model and task, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.make_arithmetic import make_arithmetic
from tools.make_tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("end_to_end")
    make_tiny_model(folder / "model", hidden_size=64)
    make_arithmetic(folder / "data", num_train=64, num_eval=8, num_sft=64)
    return folder
