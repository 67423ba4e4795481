"""`megarl recipe show`: what it prints reads back as the recipe, however narrow the terminal is."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from megarl.command_line import app
from megarl.recipe.load import load_recipe

LONG = "/models/" + "in_a_folder_with_a_long_name_" * 5 + "of [4 billion]"
WORDS = '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}'


@pytest.mark.parametrize("columns", ["40", "80"])
def test_no_value_is_cut_off_at_the_end_of_a_line(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    flags = f"rollout.server_args=[--json-model-override-args, '{WORDS}']"
    recipe = str(Path(__file__).parents[2] / "recipes" / "qwen3_4b_grpo_8.yaml")
    shown = CliRunner().invoke(app, ["recipe", "show", recipe, f"model.path={LONG}", flags]).output
    assert shown.count("\n# each step: ") == 1
    arithmetic = shown.rpartition("each step: ")[2]
    resolved = yaml.safe_load(shown)
    assert resolved["model"]["path"] == LONG
    assert resolved["rollout"]["server_args"] == ["--json-model-override-args", WORDS]
    assert arithmetic.count("\n") == 1, "one line, to be found by other programs"


def test_what_is_shown_is_a_recipe_as_it_is(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart_async.yaml"
    shown = tmp_path / "shown.yaml"
    shown.write_text(CliRunner().invoke(app, ["recipe", "show", str(recipe), "train.steps=2"]).output)
    assert load_recipe(shown).recipe == load_recipe(recipe, ["train.steps=2"]).recipe


def test_brackets_are_shown_as_they_are() -> None:
    recipe = str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml")
    shown = CliRunner().invoke(app, ["recipe", "show", recipe, "data.train=a[b].jsonl", "--essential"]).output
    assert "a[b].jsonl" in shown
