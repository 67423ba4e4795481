"""Servers that guess by layers which the model's folder has not are refused before a device is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.models.hf_config import load_model_config
from megarl.recipe.load import load_recipe
from megarl.run.draft_check import check_draft
from megarl.run.servers_check import check_servers
from tests.support.bad_input import Place, good_place
from tests.support.further import add_further
from tests.support.platforms import chosen
from tests.support.tiny import write_tiny_model, write_tiny_qwen

NONE = r"with --speculative-algorithm {} servers guess by the model's own layers, and .*model has none that predict further"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return good_place(tmp_path, write_tiny_qwen(tmp_path / "source" / "model"))


def check(place: Place, flags: str, model: Path) -> None:
    recipe = load_recipe(place.recipe, ["cluster.platform=cuda", f"rollout.server_args=[{flags}]"]).recipe
    model_section = recipe.model.model_copy(update={"path": model})
    check_draft(recipe.model_copy(update={"model": model_section}), load_model_config(model))


@pytest.mark.parametrize("name", ["NEXTN", "eagle"])
def test_a_folder_without_such_layers_is_refused(place: Place, name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "glm4_moe", num_hidden_layers=2)
    with pytest.raises(UserError, match=NONE.format(name.upper())):
        check(place, f"--speculative-algorithm={name}", folder)
    add_further(folder, "glm4_moe")
    check(place, f"--speculative-algorithm, {name}", folder)


@pytest.mark.parametrize(
    "flags",
    [
        "--log-level, info",
        "--speculative-algorithm, NGRAM",
        "--speculative-algorithm, EAGLE, --speculative-draft-model-path=/draft",
        "--speculative-algorithm, EAGLE3, --speculative-draft-model, /draft",
    ],
)
def test_others_need_none(place: Place, flags: str) -> None:
    check(place, flags, place.model)


@pytest.mark.parametrize("name", ["EAGLE3", "standalone"])
def test_a_draft_that_is_not_named_is_asked_for(place: Place, name: str) -> None:
    with pytest.raises(
        UserError, match=f"{name.upper()} guesses by a draft, and none is named. Add --speculative-draft"
    ):
        check(place, f"--speculative-algorithm={name}", place.model)


def test_who_checks_servers_asks(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("megarl.run.servers_check.check_draft", lambda *given: asked.append(given))
    recipe, model = load_recipe(place.recipe).recipe, load_model_config(place.model)
    check_servers(recipe, model, chosen())
    assert asked == [(recipe, model)]
