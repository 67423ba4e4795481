"""Small random models that see images, written by transformers itself, and images for them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tests.support.multimodal import exchange_experts
from tests.support.tiny import write_tokenizer

Architecture = Literal[
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
]
QWEN2: Architecture = "Qwen2VLForConditionalGeneration"
QWEN2_5: Architecture = "Qwen2_5_VLForConditionalGeneration"
QWEN3: Architecture = "Qwen3VLForConditionalGeneration"
QWEN3_MOE: Architecture = "Qwen3VLMoeForConditionalGeneration"
QWEN3_5: Architecture = "Qwen3_5ForConditionalGeneration"
QWEN3_5_MOE: Architecture = "Qwen3_5MoeForConditionalGeneration"
# Pixels of the side of what becomes one token.
SQUARE: dict[str, int] = {QWEN2: 28, QWEN2_5: 28, QWEN3: 32, QWEN3_MOE: 32, QWEN3_5: 32, QWEN3_5_MOE: 32}

TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Config class, what the text part has beside, and the tower.
TINY: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    QWEN2_5: (
        "Qwen2_5_VLConfig",
        {
            "num_hidden_layers": 2,
            "rope_parameters": {
                "rope_type": "default",
                "type": "default",
                "mrope_section": [2, 3, 3],
                "rope_theta": 1e6,
            },
        },
        {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "window_size": 56,  # so small that images have several
            "fullatt_block_indexes": [1],
        },
    ),
    QWEN3: (
        "Qwen3VLConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [4, 2, 2],
                "rope_theta": 5e6,
            },
        },
        {
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1, 2],
        },
    ),
}
PROCESSOR: dict[str, dict[str, Any]] = {
    QWEN2_5: {
        "min_pixels": 2 * 28 * 28,
        "max_pixels": 12 * 28 * 28,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
    },
    QWEN3: {
        "size": {"shortest_edge": 2 * 32 * 32, "longest_edge": 12 * 32 * 32},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
    },
}
TINY[QWEN3_MOE] = ("Qwen3VLMoeConfig", {**TINY[QWEN3][1], **EXPERTS}, TINY[QWEN3][2])
TINY[QWEN2] = (
    "Qwen2VLConfig",
    TINY[QWEN2_5][1],
    {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
)
PROCESSOR[QWEN2] = PROCESSOR[QWEN2_5] | {"processor_class": "Qwen2VLProcessor"}
# Gated DeltaNet in every other layer, and a part of each head that turns.
DELTA: dict[str, Any] = {
    **{"num_hidden_layers": 4, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}
TOWER = {key: value for key, value in TINY[QWEN3][2].items() if key != "deepstack_visual_indexes"}
TINY[QWEN3_5] = ("Qwen3_5Config", DELTA, TOWER)
TINY[QWEN3_5_MOE] = ("Qwen3_5MoeConfig", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32}, TOWER)
PROCESSOR |= dict.fromkeys((QWEN3_MOE, QWEN3_5, QWEN3_5_MOE), PROCESSOR[QWEN3])
# As the published templates: a part that is an image becomes three tokens, of which the second is the image's.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
ID_KEYS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")


def write_tiny_vision_model(
    folder: Path,
    architecture: Architecture = QWEN2_5,
    *,
    seed: int = 0,
    tied: bool = False,
    published: bool = False,
    text: dict[str, Any] | None = None,
    tower: dict[str, Any] | None = None,
    **saving: Any,
) -> Path:
    """Write a random model in float32, a tokenizer of one token a character, and the processor's file; returns the folder.

    published: config.json has the text's keys at its top, as Qwen2.5-VL's has. text, tower: keys of these parts. saving:
    for save_pretrained. Qwen3-VL's experts lie as they are published.
    """
    import transformers

    config_class, own, vision = TINY[architecture]
    folder.mkdir(parents=True, exist_ok=True)
    marks = _write_vision_tokenizer(folder)
    config = getattr(transformers, config_class)(
        text_config={**TEXT, **own, **(text or {}), "tie_word_embeddings": tied},
        vision_config={**vision, **(tower or {})},
        tie_word_embeddings=tied,
        **marks,
    )
    transformers.set_seed(seed)
    model = getattr(transformers, architecture)(config).to(torch.float32)
    with torch.no_grad():
        for tensor in model.parameters():
            # Norms of one and biases of zero would hide mistakes; features of the size of embeddings are seen.
            tensor.normal_(std=0.1) if tensor.dim() > 1 else tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder, **saving)
    if architecture == QWEN3_MOE and not saving:
        exchange_experts(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR[architecture]))
    if published:
        path = folder / "config.json"
        raw = json.loads(path.read_text())
        text_keys = raw.pop("text_config")
        rope = text_keys.pop("rope_parameters")
        text_keys |= {"rope_theta": rope["rope_theta"]}
        text_keys |= {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
        path.write_text(json.dumps({**text_keys, **raw}, indent=1))
    return folder


def with_score(folder: Path, target: Path, seed: int = 0) -> Path:
    """The model again, with a head of one score in the place of the vocabulary; returns the new folder."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    raw = json.loads((target / "config.json").read_text())
    raw["architectures"] = [raw["architectures"][0].replace("ConditionalGeneration", "SequenceClassification")]
    (target / "config.json").write_text(json.dumps(raw | {"id2label": {"0": "SCORE"}, "label2id": {"SCORE": 0}}))
    tensors = load_file(target / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(seed)
    tensors["score.weight"] = torch.randn((1, TEXT["hidden_size"]), generator=generator) * 0.1
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def _write_vision_tokenizer(folder: Path) -> dict[str, int]:
    """The tiny tokenizer with the tokens of images; returns what config.json says of them."""
    from transformers import AutoTokenizer

    write_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *MARKS]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(MARKS))
    assert max(ids) < TEXT["vocab_size"]
    return dict(zip(ID_KEYS, ids, strict=True))


def png(width: int, height: int, seed: int = 0) -> bytes:
    """A file of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "png", compress_level=1)
    return written.getvalue()


def experts_apart(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same, with views of each expert's gate, up and down in the place of tensors of all, as transformers has them."""
    found = {}
    for name, tensor in named.items():
        module, _, kind = name.rpartition(".")
        if not module.endswith(".mlp.experts"):
            found[name] = tensor
            continue
        kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for expert, own in enumerate(tensor):
            parts = zip(kinds, own.chunk(len(kinds)), strict=True)
            found |= {f"{module}.{expert}.{part}.weight": rows for part, rows in parts}
    return found
