"""The config.json of a multimodal model's text part, as transformers understands the whole. Imports transformers, when called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.core.errors import UserError
from megarl.core.transformers_models import without_models
from megarl.models.families import FAMILIES, score_architecture
from megarl.models.hf_fields import Fields, shown
from megarl.models.hf_fp8 import QUANTIZATION
from megarl.models.hf_rope import SHARE
from megarl.models.multimodal import Multimodal, scores

REASON_CHARACTERS = 300
# Of RoPE on several axes: one position a token, as a text has it, is the same on each.
_AXES = ("mrope_section", "mrope_interleaved")
# Keys that no text part's own config class names, and that count all the same. Of others the family would make something that
# the whole does not compute: Qwen3-VL knows no windows, and Qwen3 does.
_HEARD = {"bos_token_id", "eos_token_id", "head_dim", SHARE}


def text_config(fields: Fields, multimodal: Multimodal) -> dict[str, Any]:
    """The config of the text part as a model of its own: every key of its family, with transformers' defaults written out.

    fields: the multimodal config.json. `tie_word_embeddings` is the whole model's, and so are the tokens that begin and end a
    text, where it names them. Raises UserError where it is quantised, of another family, or transformers does not read it.
    """
    if fields.get(QUANTIZATION) is not None or fields.part("text_config").get(QUANTIZATION) is not None:
        raise UserError(
            f"{fields.path} has a {QUANTIZATION}, and text parts are taken of unquantised models alone. Take the model as it "
            "was before it was quantised."
        )
    try:
        with without_models():
            from transformers import CONFIG_MAPPING, PreTrainedConfig

        whole = CONFIG_MAPPING[multimodal.model_type].from_dict(dict(fields.raw))
        part: dict[str, Any] = whole.text_config.to_dict()
        if part.get("rope_parameters"):
            part["rope_parameters"] = _one_axis(part["rope_parameters"])
        kind = multimodal.text_types.get(part["model_type"], part["model_type"])
        if kind != part["model_type"]:
            passed_over = CONFIG_MAPPING[kind]().to_dict().keys() - type(whole.text_config)().to_dict().keys() - _HEARD
            heard = {key: value for key, value in part.items() if key not in passed_over}
            part = CONFIG_MAPPING[kind](**_spelled_out(heard, kind), **multimodal.says).to_dict()
        common = PreTrainedConfig().to_dict()
    except Exception as error:  # which ones its checks raise, no documentation says
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:REASON_CHARACTERS]
        raise UserError(
            f"{fields.path}: transformers cannot read this config ({reason}). Export the model again."
        ) from error
    architecture = next((name for name, family in FAMILIES.items() if kind in family.model_types), None)
    if architecture is None:
        raise UserError(
            f"{fields.path}: the text part has model_type {shown(kind)}, which is no family that megarl trains. Its families "
            f"are: {', '.join(FAMILIES)}."
        )
    said = {key: value for key, value in part.items() if key not in common and not key.startswith("_")}
    ends = {key: fields.raw[key] for key in ("bos_token_id", "eos_token_id") if fields.get(key) is not None}
    dtype = whole.dtype or whole.text_config.dtype
    head = scores(fields.words("architectures", lone=True))
    return {
        "architectures": [score_architecture(architecture) if head else architecture],
        "model_type": kind,
        **({"id2label": dict(whole.id2label)} if head else {}),
        **said,
        **ends,
        **({} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}),
        "tie_word_embeddings": bool(whole.tie_word_embeddings),
    }


def _spelled_out(part: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The keys for a family's config class, with what it would else give another default than the multimodal one's."""
    said = {key: value for key, value in part.items() if key != "model_type"}
    said.setdefault("head_dim", said["hidden_size"] // said["num_attention_heads"])
    if any(kind in family.model_types and family.rotary_share is not None for family in FAMILIES.values()):
        said["rope_parameters"] = {SHARE: 1.0, **said["rope_parameters"]}
    return said


def _one_axis(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a text: without axes, and of the kind that transformers took it for (`type` is the older key)."""
    dropped = (*_AXES, "type") if "rope_type" in rope else _AXES
    return {key: value for key, value in rope.items() if key not in dropped}
