"""A small valid recipe that tests bend."""

from __future__ import annotations

from pathlib import Path

import pytest

RECIPE = """\
model:
  path: model
data:
  train: rows.jsonl
rollout:
  prompts_per_step: 8
  samples_per_prompt: 4
  max_response_tokens: 64
train:
  steps: 10
"""

SFT_RECIPE = """\
model: {path: model}
data: {train: rows.jsonl}
train:
  steps: 10
  batch_samples: 16
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


RM_RECIPE = SFT_RECIPE + "rm: {}\n"
DPO_RECIPE = SFT_RECIPE + "dpo: {}\n"
KTO_RECIPE = SFT_RECIPE + "kto: {}\n"


@pytest.fixture
def kto_file(tmp_path: Path) -> Path:
    file = tmp_path / "kto.yaml"
    file.write_text(KTO_RECIPE)
    return file


@pytest.fixture
def rm_file(tmp_path: Path) -> Path:
    file = tmp_path / "rm.yaml"
    file.write_text(RM_RECIPE)
    return file


@pytest.fixture
def dpo_file(tmp_path: Path) -> Path:
    file = tmp_path / "dpo.yaml"
    file.write_text(DPO_RECIPE)
    return file


@pytest.fixture
def sft_file(tmp_path: Path) -> Path:
    file = tmp_path / "sft.yaml"
    file.write_text(SFT_RECIPE)
    return file
