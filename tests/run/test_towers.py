"""Where a vision tower may learn: what is refused before a device is taken, and what a run builds of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.data.digests import NO_DIGESTS
from megarl.models.rules import TOWER
from megarl.models.vision import PREPROCESSOR
from megarl.recipe.layouts import tower_roles
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe
from megarl.recipe.supervised import SftRecipe
from megarl.run.preflight import preflight, preflight_supervised
from megarl.run.resume_check import check_resumed
from megarl.run.role_specs import role_specs
from megarl.training.manifest import HF_FOLDER, Manifest, TensorEntry
from megarl.training.run_checkpoints import Committed
from tests.run.test_rows_images import SFT
from tests.support.bad_input import Place, good_place
from tests.support.sight import picture
from tests.support.tiny import write_tiny_qwen
from tests.support.vision import QWEN2_5, QWEN3, write_tiny_vision_model

LEARNS, CRITIC = "actor.optimizer.freeze_vision_tower=false", "critic.optimizer.freeze_vision_tower=false"
PPO = "algorithm.preset=ppo"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    found = {name: write_tiny_vision_model(root / name, name) for name in (QWEN2_5, QWEN3)}
    return found | {"text": write_tiny_qwen(root / "text")}


@pytest.fixture
def place(tmp_path: Path, folders: dict[str, Path]) -> Place:
    return with_rows(tmp_path, folders[QWEN2_5])


def with_rows(root: Path, model: Path) -> Place:
    """Every other row has an image."""
    place = good_place(root, model)
    (root / "a.png").write_bytes(picture(64, 64))
    place.write_rows(*(row(n, **({"images": "a.png"} if n % 2 else {})) for n in range(6)))
    (root / "sft.yaml").write_text(SFT.format(root=root))
    return place


def row(number: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": f"{number}+1", "answer": str(number + 1), **fields}


def loaded(place: Place, *overrides: str) -> Recipe:
    return load_recipe(place.recipe, overrides).recipe


def refused(place: Place, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        preflight(loaded(place, *overrides))
    assert not place.run.exists()
    return str(caught.value)


def supervised(place: Place, *overrides: str) -> SftRecipe:
    return load_recipe(place.root / "sft.yaml", overrides, SftRecipe).recipe


def test_it_learns_where_rows_have_images(place: Place) -> None:
    assert preflight(loaded(place, LEARNS)).rows == 6
    assert preflight_supervised(supervised(place, LEARNS)).rows == 6
    assert preflight(loaded(place, PPO, CRITIC)).rows == 6


def test_a_model_that_sees_no_images_is_refused(tmp_path: Path, folders: dict[str, Path], place: Place) -> None:
    text = good_place(tmp_path / "blind", folders["text"])
    said = "actor.optimizer.freeze_vision_tower: false lets a vision tower learn, and {} is a model that sees no images"
    assert said.format(text.model) in refused(text, LEARNS)
    text.write_rows(*map(row, range(6)))
    (text.root / "sft.yaml").write_text(SFT.format(root=text.root))
    with pytest.raises(UserError, match=r"is a model that sees no images. Remove the key, or name a model that does"):
        preflight_supervised(supervised(text, LEARNS))
    # A critic of its own may be one.
    (text.model / "tokenizer.json").write_bytes((place.model / "tokenizer.json").read_bytes())
    shown = refused(place, PPO, f"critic.path={text.model}", CRITIC)
    assert f"critic.optimizer.freeze_vision_tower: false lets a vision tower learn, and {text.model} is" in shown


def test_a_run_that_shows_no_images_is_refused(place: Place) -> None:
    said = refused(place, LEARNS, "data.images_key=null")
    assert "with data.images_key null no row has an image. Name the field of images there, or remove the key" in said
    shown = ["agent.environment=guess_number", "data.max_prompt_tokens=300", "rollout.max_response_tokens=100"]
    assert preflight(loaded(place, LEARNS, "data.images_key=null", *shown)).rows == 6, "its environment may show some"
    place.write_rows(*map(row, range(6)))
    said = (
        f"no row of {place.data} has an image in its field 'images' (data.images_key). Name the field of images there"
    )
    assert said in refused(place, LEARNS)
    assert "critic.optimizer.freeze_vision_tower: false" in refused(place, PPO, CRITIC)
    with pytest.raises(UserError, match=r"no row of .* has an image in its field 'images'"):
        preflight_supervised(supervised(place, LEARNS))
    assert preflight(loaded(place, LEARNS, *shown)).rows == 6
    assert preflight_supervised(supervised(place)).rows == 6


def test_layers_behind_which_features_are_added_are_on_the_first_stage(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    """Three of them, of four layers: the tower's gradients are made where it stands."""
    place = with_rows(tmp_path, folders[QWEN3])
    two = ("cluster.devices=2", "actor.parallel.pp=2")
    said = refused(place, *two, LEARNS)
    assert "actor.parallel" in said and "stage ends behind layer 2, and features of images come behind 3" in said
    assert "Nearest layouts that work: " in said and "pp 2" not in said.partition("Nearest")[2]
    assert preflight(loaded(place, *two)).rows == 6, "a frozen one stands where it is asked"
    assert preflight(loaded(place, *two, "actor.parallel.first_stage_layers=3", LEARNS)).rows == 6
    virtual = ("cluster.devices=2", "actor.parallel={pp: 2, vpp: 2}")
    assert "the first pipeline stage ends behind layer 1" in refused(place, *virtual, LEARNS)
    alone = [PPO, "critic.parallel={pp: 2}", "actor.parallel={}", "cluster.devices=2", CRITIC]
    assert "critic.parallel" in refused(place, *alone)


def test_a_reference_that_is_refreshed_has_it_as_the_actor_does(place: Place) -> None:
    refreshed = ("algorithm.kl_coef=0.1", "reference.refresh_every=1")
    recipe = loaded(place, LEARNS, *refreshed)
    specs = role_specs(recipe, preflight(recipe))
    assert specs["actor"].holds_tower and specs["reference"].holds_tower
    assert tower_roles(recipe) == {"actor", "reference"}
    stays = loaded(place, LEARNS, refreshed[0])
    assert not role_specs(stays, preflight(stays))["reference"].has_tower, "as the files have it"
    assert tower_roles(loaded(place, *refreshed)) == set()
    assert tower_roles(loaded(place, PPO, CRITIC, *refreshed)) == {"critic"}


@pytest.mark.parametrize(("role", "words"), [("actor", ()), ("critic", (PPO,))])
@pytest.mark.parametrize("stood", [False, True])
def test_a_resume_that_would_have_it_learn_or_stand_still_is_refused(
    place: Place, tmp_path: Path, role: str, words: tuple[str, ...], stood: bool
) -> None:
    """A tower that stood still is not among the checkpoint's weights, and one that learned would be left behind."""
    key = f"{role}.optimizer.freeze_vision_tower"
    before, now = (loaded(place, *words, *([] if frozen else [f"{key}=false"])) for frozen in (stood, not stood))
    committed = checkpoint(before, tmp_path / "step_000001")
    check_resumed(before, committed, 6, NO_DIGESTS)
    with pytest.raises(UserError, match=rf"{key} was {stood} and is {not stood}\n"):
        check_resumed(now, committed, 6, NO_DIGESTS)


def test_checkpoints_of_an_older_megarl_have_it_frozen(place: Place, tmp_path: Path) -> None:
    committed = checkpoint(loaded(place), tmp_path / "step_000001", without="freeze_vision_tower")
    check_resumed(loaded(place), committed, 6, NO_DIGESTS)
    with pytest.raises(UserError, match=r"actor.optimizer.freeze_vision_tower was True and is False\n"):
        check_resumed(loaded(place, LEARNS), committed, 6, NO_DIGESTS)


def checkpoint(recipe: Recipe, folder: Path, without: str = "") -> Committed:
    """What a resume looks at. without: a key that its optimizers say nothing of."""
    sections = {"actor": recipe.actor} | ({} if recipe.critic is None else {"critic": recipe.critic})
    for role, section in sections.items():
        (folder / role / HF_FOLDER).mkdir(parents=True)
        for name in ("config.json", PREPROCESSOR):
            shutil.copy(recipe.model.path / name, folder / role / HF_FOLDER)
        learns = not section.optimizer.freeze_vision_tower
        said = {key: value for key, value in section.optimizer.model_dump(mode="json").items() if key != without}
        Manifest(
            family="qwen2",
            architecture=QWEN2_5,
            dtype="float32",
            step=1,
            layout=Layout(),
            optimizer=said,
            total_steps=2,
            lora=None,
            versions={},
            tensors={f"{TOWER}patch_embed.proj.weight": TensorEntry((2, 2), "float32", 16)} if learns else {},
            files={},
        ).write(folder / role)
    return Committed(folder, 1, {})
