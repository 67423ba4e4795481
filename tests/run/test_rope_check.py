"""Which scalings of RoPE SGLang reads otherwise than transformers. Each was held against a server: bench/served_models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.models.hf_config import load_model_config
from megarl.run.rope_check import check_served_rope
from tests.support.olmo import as_published
from tests.support.tiny import LLAMA3, write_tiny_model

THETA = 1e4
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FOLLOWS = 1.1386294361119891  # 0.1 ln 4 + 1 (arXiv 2309.00071)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("rope") / "model")


def checked(source: Path, **keys: Any) -> None:
    file = source / "config.json"
    before = file.read_text()
    config = json.loads(before)
    config.pop("rope_parameters", None)
    try:
        file.write_text(json.dumps(config | keys))
        check_served_rope("`model.path`", source, load_model_config(source))
    finally:
        file.write_text(before)


@pytest.mark.parametrize("more", [{}, {"attention_factor": FOLLOWS}, {"truncate": False, "attn_factor": 1}])
def test_what_both_read_alike_is_served(source: Path, more: dict[str, Any]) -> None:
    checked(source, rope_theta=THETA, rope_scaling=YARN | more)
    checked(source, rope_parameters=YARN | more | {"rope_theta": THETA})
    checked(source, rope_theta=THETA, rope_scaling={"rope_type": "linear", "factor": 4.0, "attn_factor": 2})


@pytest.mark.parametrize(
    ("scaling", "more", "says"),
    [
        ({"attention_factor": 1.7}, {}, r"attention_factor is 1\.7, and SGLang takes 1\.13863"),
        ({"attn_factor": 1.7}, {}, r"SGLang multiplies by attn_factor, 1\.7, .* Remove it"),
        ({"extrapolation_factor": 2}, {}, r"SGLang multiplies by extrapolation_factor, 2"),
        ({"mscale": 0.0, "mscale_all_dim": 0.0}, {}, r"of 0 are none to transformers, and zero to SGLang"),
        ({}, {"original_max_position_embeddings": 32}, r"from inside\. Write 32 inside"),
        ({"beta_fast": None}, {}, r"beta_fast is null, with which SGLang does not start"),
        ({"factor": None}, {}, r"SGLang wants `factor` .* Write 32, which transformers takes"),
    ],
)
def test_what_they_read_otherwise_is_refused(
    source: Path, scaling: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=rf"^`model\.path`: RoPE is scaled by yarn in its config\.json\. .*{says}"):
        checked(source, rope_theta=THETA, rope_scaling=YARN | scaling, **more)


def test_the_first_context_of_llama3_is_read_inside_too(source: Path) -> None:
    inside = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    checked(source, rope_theta=THETA, rope_scaling=inside)
    with pytest.raises(UserError, match=r"scaled by llama3 in its config\.json\. .* Write 32 inside"):
        checked(source, rope_theta=THETA, rope_scaling=inside, original_max_position_embeddings=32)


def test_of_llamas_kind_sglang_hears_what_stands_outside_as_transformers_does(tmp_path: Path) -> None:
    for family in ("llama", "exaone4"):
        folder = write_tiny_model(tmp_path / family, family)
        checked(folder, rope_theta=THETA, rope_scaling=YARN, original_max_position_embeddings=32)


def test_what_transformers_code_serves_is_served_whatever_it_reads(tmp_path: Path) -> None:
    for family in ("smollm3", "seed_oss"):
        folder = write_tiny_model(tmp_path / family, family)
        checked(folder, rope_theta=THETA, rope_scaling=YARN | {"attention_factor": 1.7})


@pytest.mark.parametrize("scaling", [YARN, {"rope_type": "linear", "factor": 4.0}])
def test_olmo_3_is_served_with_the_keys_of_the_published_models(scaling: dict[str, Any], tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "olmo3", rope_parameters=scaling | {"rope_theta": THETA})
    model = load_model_config(folder)
    with pytest.raises(UserError, match=r"SGLang does not read of Olmo3ForCausalLM\. Write it in two keys"):
        check_served_rope("model", folder, model)
    assert load_model_config(as_published(folder)) == model
    check_served_rope("model", folder, model)
