"""A stand-in hub with a tiny model and a data set in GSM8K's shape, for all tests of this folder that do not change it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.support.stand_in_hub import StandInHub, ask_stand_in, serve_stand_in_hub
from tests.support.tiny import write_tiny_model

MODEL, ROWS = "own/tiny", "own/grade-school"
CARD = """\
---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
# Grade school
"""


def parquet(first: int, count: int) -> bytes:
    """Rows as GSM8K has them: a question, and a worked answer that ends with `#### N`."""
    rows = [
        {"question": f"{n} and {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"}
        for n in range(first, first + count)
    ]
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


@pytest.fixture
def hub(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """Asked by this process, whose cache is empty and whose folder is."""
    with serve_stand_in_hub() as hub:
        hub.put_folder("model", MODEL, tiny, **{"consolidated.safetensors": b"x", "pytorch_model.bin": b"x"})
        hub.put(
            "dataset",
            ROWS,
            {
                "README.md": CARD.encode(),
                "main/train-00000-of-00002.parquet": parquet(1, 5),
                "main/train-00001-of-00002.parquet": parquet(6, 3),
                "main/test-00000-of-00001.parquet": parquet(20, 2),
                "socratic/train-00000-of-00001.parquet": parquet(30, 2),
            },
        )
        ask_stand_in(monkeypatch, hub.url, tmp_path / "home")
        monkeypatch.chdir(tmp_path)
        yield hub


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    sections = {
        "cluster": {"platform": "cpu"},
        "model": {"path": MODEL, "dtype": "float32"},
        "data": {"train": ROWS, "eval": ROWS, "config": "main", "prompt_key": "question", "max_prompt_tokens": 48},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_response_tokens": 8},
        "train": {"steps": 1},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(sections))
    return path
