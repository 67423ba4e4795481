"""Which servers are refused to a model that sees images, before a device is taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.models.hf_config import load_model_config
from megarl.models.vision import Vision
from megarl.recipe.load import load_recipe
from megarl.run.images_check import check_seeing_servers
from megarl.run.servers_check import check_servers
from tests.support.bad_input import Place, good_place
from tests.support.multimodal import exchange_experts
from tests.support.platforms import chosen
from tests.support.tiny import write_tiny_qwen
from tests.support.vision import QWEN3_MOE, write_tiny_vision_model

VISION = Vision(82, 80, 81, 28, 28 * 28, 1280 * 28 * 28, (2, 3, 3))
LORA = "actor.lora={rank: 4, alpha: 8}"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return good_place(tmp_path, write_tiny_qwen(tmp_path / "source" / "model"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["rollout.deterministic=true"],
            r"`rollout.deterministic`: .* depends on what else it answers. Set it to false",
        ),
        (
            ["rollout.servers={urls: [http://127.0.0.1:1]}"],
            "`rollout.servers.urls`: .* Set rollout.servers to a number",
        ),
        (
            ["rollout.quantization=fp8", "model.dtype=bfloat16"],
            "`rollout.quantization`: .* those of the vision tower. Set it to null",
        ),
        ([LORA, "sync.lora=adapters"], "`sync.lora`: .* no adapters beside a vision tower. Set it to merged"),
    ],
)
def test_servers_that_do_not_see_as_the_model_does_are_refused(place: Place, overrides: list[str], said: str) -> None:
    recipe, blind = load_recipe(place.recipe, overrides).recipe, load_model_config(place.model)
    check_seeing_servers(recipe, blind)
    with pytest.raises(UserError, match=said):
        check_seeing_servers(recipe, replace(blind, vision=VISION))


def test_others_are_not_and_who_checks_servers_asks(place: Place) -> None:
    seeing = replace(load_model_config(place.model), vision=VISION)
    assert check_servers(load_recipe(place.recipe, [LORA]).recipe, seeing, chosen()) is None
    with pytest.raises(UserError, match=r"rollout.deterministic"):
        check_servers(load_recipe(place.recipe, ["rollout.deterministic=true"]).recipe, seeing, chosen())


def test_experts_that_servers_would_misread_are_refused(tmp_path: Path) -> None:
    """Those that lie as transformers writes them; and square ones, of which the two libraries think otherwise."""
    place = good_place(tmp_path, write_tiny_vision_model(tmp_path / "source" / "model", QWEN3_MOE))
    recipe = load_recipe(place.recipe).recipe
    check_seeing_servers(recipe, load_model_config(place.model))
    exchange_experts(place.model)
    with pytest.raises(
        UserError, match=r"0.mlp.experts.\w+ in .* is \[4, .*, and SGLang takes .* `megarl convert mcore-to-hf"
    ):
        check_seeing_servers(recipe, load_model_config(place.model))
    square = write_tiny_vision_model(tmp_path / "square", QWEN3_MOE, text={"moe_intermediate_size": 64})
    square.replace(place.model.rename(tmp_path / "earlier").with_name("model"))
    with pytest.raises(
        UserError, match=r"experts.down_proj in .* takes a square matrix as it lies. Take a model whose"
    ):
        check_seeing_servers(recipe, load_model_config(place.model))
