"""Multimodal HF architectures whose text part is a family of megarl's: what their tensors are called. Without torch.

Of some of them megarl trains the text part where it is, and shows it images (vision.py). The others are refused where one is to
be trained; `megarl convert text-part` writes their text part as a model of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from megarl.core.errors import UserError
from megarl.core.words import some
from megarl.models.families import FAMILIES
from megarl.models.hf_fields import Fields, shown

SHOWN = 5
TOWER = "visual."  # how names of a vision tower's tensors begin, behind what else may stand in front
# How architectures' names end; the second, of a head of one score, is megarl's own: transformers has no such multimodal model.
CONDITIONAL, SCORING = "ForConditionalGeneration", "ForSequenceClassification"

# Prefix in the multimodal folder -> prefix in a folder of the text part; None: not of the text part. The first that fits counts.
Prefixes = Mapping[str, str | None]

# As transformers 5.12 reads them (conversion_mapping.py): of the text part alone with its own head, or of one model.
_LLAVA: Prefixes = MappingProxyType(
    {
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
        "lm_head.": "lm_head.",
    }
)
_NEWER: Prefixes = MappingProxyType({"model.language_model.": "model.", "lm_head.": "lm_head.", "score.": "score."})
_QWEN2: Prefixes = MappingProxyType(
    {
        "model.language_model.": "model.",
        "model.visual.": None,
        "model.": "model.",
        "lm_head.": "lm_head.",
        "score.": "score.",
    }
)


@dataclass(frozen=True)
class Multimodal:
    """One architecture.

    model_type: by which transformers chooses it. text_types: the text part's model_type -> that of the family that it is.
    says: keys of the family's config that the whole's has not, because it computes nothing else. stacked_experts: a layer's
    lie in one tensor, and one by one in folders of the family; as published with rows and columns exchanged.
    sees: megarl trains it with images.
    """

    model_type: str
    prefixes: Prefixes
    text_types: Mapping[str, str] = field(default_factory=dict)
    says: Mapping[str, object] = field(default_factory=dict)
    stacked_experts: bool = False
    sees: bool = False

    def text_name(self, name: str) -> str | None:
        """What a tensor is called in a folder of the text part; None where it is of another part."""
        for prefix, text in self.prefixes.items():
            if name.startswith(prefix):
                return None if text is None else text + name.removeprefix(prefix)
        return None


MULTIMODALS: Mapping[str, Multimodal] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": Multimodal("gemma3", _LLAVA),
        "Gemma4ForConditionalGeneration": Multimodal("gemma4", _NEWER),
        # Without a tower; its text part is that of the others, whose config says what this one never has.
        "Gemma4UnifiedForConditionalGeneration": Multimodal(
            "gemma4_unified", _NEWER, {"gemma4_unified_text": "gemma4_text"}, {"hidden_size_per_layer_input": 0}
        ),
        "Mistral3ForConditionalGeneration": Multimodal("mistral3", _LLAVA),
        "LlavaForConditionalGeneration": Multimodal("llava", _LLAVA),
        "LlavaNextForConditionalGeneration": Multimodal("llava_next", _LLAVA),
        "LlavaOnevisionForConditionalGeneration": Multimodal("llava_onevision", _LLAVA),
        "InternVLForConditionalGeneration": Multimodal("internvl", _LLAVA),
        # Tokens of a text have the same position on all three axes, which is RoPE as the family has it.
        "Qwen2VLForConditionalGeneration": Multimodal("qwen2_vl", _QWEN2, {"qwen2_vl_text": "qwen2"}, sees=True),
        "Qwen2_5_VLForConditionalGeneration": Multimodal("qwen2_5_vl", _QWEN2, {"qwen2_5_vl_text": "qwen2"}, sees=True),
        "Qwen3VLForConditionalGeneration": Multimodal("qwen3_vl", _NEWER, {"qwen3_vl_text": "qwen3"}, sees=True),
        "Qwen3VLMoeForConditionalGeneration": Multimodal(
            "qwen3_vl_moe",
            _NEWER,
            {"qwen3_vl_moe_text": "qwen3_moe"},
            {"norm_topk_prob": True},
            stacked_experts=True,
            sees=True,
        ),
        "Qwen3_5ForConditionalGeneration": Multimodal("qwen3_5", _NEWER, sees=True),
        "Qwen3_5MoeForConditionalGeneration": Multimodal("qwen3_5_moe", _NEWER, sees=True),
        "Glm4vForConditionalGeneration": Multimodal("glm4v", _NEWER, {"glm4v_text": "glm4"}),
    }
)

# Published with code of their own, and again as transformers has them.
_AGAIN: Mapping[str, str] = MappingProxyType({"InternVLChatModel": "InternVLForConditionalGeneration"})


def read_multimodal(fields: Fields) -> Multimodal:
    """What a config.json names. Raises UserError where that is none of these."""
    architectures = fields.words("architectures", lone=True)
    found = next((each for each in map(_known, architectures) if each is not None), None)
    if found is None:
        raise UserError(
            f"{fields.path}: architecture {_named(architectures)} is no multimodal model whose text part megarl knows. "
            f"These are: {', '.join(MULTIMODALS)}.{_again(architectures)}"
        )
    if fields.get("model_type") != found.model_type:
        fields.refuse(
            "model_type", fields.get("model_type"), f"{found.model_type!r}, as the architecture has it, is wanted"
        )
    return found


def whole_name(text: str, *, newer: bool) -> str:
    """What a tensor of the text part, or of a tower that learns, is called in a folder of a model that megarl trains with images.

    newer: as transformers' modules are called since its version 5, not as Qwen2.5-VL is published.
    """
    if newer and text.startswith(TOWER):
        return f"model.{text}"
    return f"model.language_model.{text.removeprefix('model.')}" if newer and text.startswith("model.") else text


def tower_names(names: Iterable[str]) -> dict[str, str]:
    """What tensors of the vision tower are called in it -> what they are called in a multimodal folder. names: of its tensors."""
    return {name.partition(TOWER)[2]: name for name in names if TOWER in name}


def has_newer_names(names: Iterable[str]) -> bool:
    """Whether a multimodal folder's tensors are called as transformers' modules are since its version 5."""
    return any(name.startswith(f"model.{TOWER}") for name in names)


def sees(architectures: Iterable[str]) -> bool:
    """Whether a config.json names a model that megarl trains with images."""
    return any(found is not None and found.sees for found in map(_known, architectures))


def scored_multimodal(architecture: str) -> str:
    """What megarl calls a multimodal architecture with a head of one score."""
    return architecture.replace(CONDITIONAL, SCORING)


def scores(architectures: Iterable[str]) -> bool:
    """Whether a multimodal config.json names a head of one score."""
    return any(name.endswith(SCORING) for name in architectures)


def _known(architecture: str) -> Multimodal | None:
    """The architecture, or the one that it is with a head of one score; None where it is none of these."""
    found = MULTIMODALS.get(architecture.replace(SCORING, CONDITIONAL))
    return found if found is not None and (found.sees or architecture in MULTIMODALS) else None


def text_names(names: Iterable[str], multimodal: Multimodal, folder: Path) -> dict[str, str]:
    """What tensors of the text part are called in a folder of its own -> what they are called here.

    names: of all tensors of the folder. Raises UserError where two of them have the same.
    """
    found, twice = dict[str, str](), []
    for name in names:
        text = multimodal.text_name(name)
        if text is not None and text in found:
            twice.append(f"{found[text]} and {name}")
        elif text is not None:
            found[text] = name
    if twice:
        raise UserError(
            f"The weights in {folder} hold tensors of the text part twice, by an older and a newer name: {some(twice, SHOWN)}. "
            "Copy or export the model again."
        )
    return found


def unsupported(architectures: Iterable[str], path: Path) -> UserError:
    """Of a config.json whose architecture is no family of megarl's."""
    if any(name in MULTIMODALS for name in architectures):
        return UserError(
            f"{path}: {_named(architectures)} is a multimodal model of which megarl trains the text part alone. Write that as a "
            f"model of its own, by `megarl convert text-part {path.parent} TEXT`, and name that folder (TEXT) instead; "
            "`megarl convert into-multimodal` puts trained weights back."
        )
    return UserError(
        f"{path}: architecture {_named(architectures)} is not supported. Supported: {', '.join(FAMILIES)}."
        f"{_again(architectures)}"
    )


def _again(architectures: Iterable[str]) -> str:
    found = next((_AGAIN[name] for name in architectures if name in _AGAIN), "")
    return (
        f" The same model is published as {found} too, in a folder whose name ends in -hf: take that." if found else ""
    )


def _named(architectures: Iterable[str]) -> str:
    return ", ".join(map(shown, architectures)) or "missing"
