"""`megarl recipe show`: what it prints reads back as the recipe, however narrow the terminal is."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from megarl.cli import app

LONG = "/models/" + "in_a_folder_with_a_long_name_" * 5 + "of [4 billion]"
WORDS = '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}'


@pytest.mark.parametrize("columns", ["40", "80"])
def test_no_value_is_cut_off_at_the_end_of_a_line(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    flags = f"rollout.server_args=[--json-model-override-args, '{WORDS}']"
    recipe = str(Path(__file__).parents[2] / "recipes" / "qwen3_4b_grpo_8.yaml")
    shown = CliRunner().invoke(app, ["recipe", "show", recipe, f"model.path={LONG}", flags]).output
    values, arithmetic = shown.split("each step: ")
    resolved = yaml.safe_load(values)
    assert resolved["model"]["path"] == LONG
    assert resolved["rollout"]["server_args"] == ["--json-model-override-args", WORDS]
    assert arithmetic.count("\n") == 1, "one line, to be found by other programs"


def test_brackets_are_shown_as_they_are() -> None:
    recipe = str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml")
    shown = CliRunner().invoke(app, ["recipe", "show", recipe, "data.train=a[b].jsonl", "--essential"]).output
    assert "a[b].jsonl" in shown
