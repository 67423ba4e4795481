"""What the tensors of multimodal folders are called, and how such a folder is refused where a model is to be trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.models.hf_config import parse_model_config
from megarl.models.hf_fields import Fields
from megarl.models.multimodal import MULTIMODALS, read_multimodal, scored_multimodal, scores, sees

PATH = Path("models/vl/config.json")


@pytest.mark.parametrize("architecture", [name for name, each in MULTIMODALS.items() if not each.sees])
def test_a_multimodal_model_is_refused_with_the_command_that_takes_its_text_part(architecture: str) -> None:
    with pytest.raises(UserError) as error:
        parse_model_config({"architectures": [architecture], "text_config": {}}, PATH)
    said = str(error.value)
    assert said.startswith(
        f"models/vl/config.json: '{architecture}' is a multimodal model of which megarl trains the text part alone."
    )
    assert "`megarl convert text-part models/vl TEXT`" in said and "`megarl convert into-multimodal`" in said


def test_another_multimodal_model_is_refused_as_any_other() -> None:
    with pytest.raises(
        UserError, match=r"architecture 'IdeficsForVisionText2Text' is not supported\. Supported: Qwen2For"
    ):
        parse_model_config({"architectures": ["IdeficsForVisionText2Text"]}, PATH)


@pytest.mark.parametrize("read", [parse_model_config, lambda raw, path: read_multimodal(Fields(raw, path))])
def test_a_model_with_code_of_its_own_is_refused_with_the_form_that_has_none(
    read: Callable[[dict[str, Any], Path], Any],
) -> None:
    with pytest.raises(
        UserError,
        match=r"'InternVLChatModel' is n.* published as InternVLForConditionalGeneration too, .*-hf: take that",
    ):
        read({"architectures": ["InternVLChatModel"], "model_type": "internvl_chat"}, PATH)


@pytest.mark.parametrize(
    ("architecture", "name", "text"),
    [
        ("Gemma3", "language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("Gemma3", "model.language_model.norm.weight", "model.norm.weight"),
        ("Gemma3", "language_model.lm_head.weight", "lm_head.weight"),
        ("Gemma3", "lm_head.weight", "lm_head.weight"),
        ("Gemma3", "model.multi_modal_projector.mm_soft_emb_norm.weight", None),
        ("Gemma3", "vision_tower.vision_model.embeddings.patch_embedding.bias", None),
        ("Mistral3", "multi_modal_projector.norm.weight", None),
        ("Qwen2_5_VL", "model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("Qwen2_5_VL", "model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("Qwen2_5_VL", "visual.blocks.0.attn.qkv.weight", None),
        ("Qwen2_5_VL", "model.visual.blocks.0.attn.qkv.weight", None),
        ("Qwen3VL", "model.language_model.layers.1.self_attn.q_norm.weight", "model.layers.1.self_attn.q_norm.weight"),
        ("Qwen3VL", "model.visual.deepstack_merger_list.0.norm.weight", None),
        ("Qwen3VL", "language_model.model.norm.weight", None),  # which transformers does not read either
    ],
)
def test_names(architecture: str, name: str, text: str | None) -> None:
    assert MULTIMODALS[f"{architecture}ForConditionalGeneration"].text_name(name) == text


def test_a_head_of_one_score_has_a_name_of_megarls_where_images_are_seen() -> None:
    for architecture, each in MULTIMODALS.items():
        scored = scored_multimodal(architecture)
        assert scores([scored]) and not scores([architecture])
        assert sees([scored]) == sees([architecture]) == each.sees
        if each.sees:
            raw = {"architectures": [scored], "model_type": each.model_type}
            assert read_multimodal(Fields(raw, PATH)) is each
