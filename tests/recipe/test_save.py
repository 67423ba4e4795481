from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from megarl.core.versions import installed, matches, pins
from megarl.recipe.load import load_recipe
from megarl.recipe.save import git_state, save_recipe
from megarl.recipe.schema import Recipe
from megarl.recipe.supervised import SftRecipe


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["run.name='1e5'", "actor.optimizer.lr=3e-7", "rollout.stop=['on', '1e-5', \"\\n\"]"],
        ["data.eval=e.jsonl", "eval.every=2", "algorithm.kl_coef=0.01", "report.wandb.project=x"],
        ["actor.optimizer.name=sgd", "actor.optimizer.momentum=0.5", "rollout.kv_tokens=9999"],
    ],
)
def test_the_saved_recipe_loads_back_to_the_same(recipe_file: Path, tmp_path: Path, overrides: list[str]) -> None:
    loaded = load_recipe(recipe_file, overrides)
    save_recipe(loaded, tmp_path / "runs" / "x")
    again = load_recipe(tmp_path / "runs" / "x" / "recipe.yaml", [], Recipe)
    assert again.recipe == loaded.recipe
    assert again.resolved == loaded.resolved


def test_a_recipe_of_a_folder_whose_name_is_not_utf_8_is_saved(recipe_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    file = recipe_file.rename(folder / "r.yaml")
    save_recipe(loaded := load_recipe(file), tmp_path / "run")
    assert load_recipe(tmp_path / "run" / "recipe.yaml").recipe == loaded.recipe


def test_the_saved_supervised_recipe_loads_back(sft_file: Path, tmp_path: Path) -> None:
    loaded = load_recipe(sft_file, [], SftRecipe)
    save_recipe(loaded, tmp_path / "run")
    assert load_recipe(tmp_path / "run" / "recipe.yaml", [], SftRecipe).recipe == loaded.recipe


def test_provenance_names_versions_git_and_platform(recipe_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save_recipe(load_recipe(recipe_file, ["cluster.platform=cpu", "run.seed=3"]), folder)
    saved = json.loads((folder / "provenance.json").read_text())
    assert saved["recipe"]["overrides"] == ["cluster.platform=cpu", "run.seed=3"]
    assert saved["recipe"]["sources"]["run.seed"] == "on the command line"
    assert saved["versions"]["megatron-core"]["pinned"] == pins()["megatron-core"]
    assert saved["versions"]["ray"]["installed"] == installed("ray")
    assert saved["platform"]["name"] == "cpu"
    assert saved["batch"].startswith("each step: 8 prompts x 4 samples = 32 samples")
    assert sorted(path.name for path in folder.iterdir()) == ["provenance.json", "recipe.yaml"]


def test_git_state_names_the_commit_and_what_was_changed(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None

    def git(*command: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        run = subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True, text=True)
        return run.stdout.strip()

    git("init", "-q")
    (tmp_path / "a.txt").write_text("1")
    git("add", "a.txt")
    git("commit", "-q", "-m", "one")
    (tmp_path / "untracked.txt").write_text("1")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "changed": []}
    (tmp_path / "a.txt").write_text("2")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "changed": ["a.txt"]}


def test_versions() -> None:
    assert matches("2.13.0+cpu", "2.13.0")
    assert not matches("2.13.1", "2.13.0")
    assert installed("a-package-that-nobody-made") is None
    assert set(pins()) >= {"torch", "megatron-core", "sglang", "sglang-router", "ray", "transformers"}
