"""Small random multimodal models, written by transformers itself, in each generation of names that their folders have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny import GEMMA4_EXPERTS, write_tokenizer

QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "out_hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 24,
    "num_position_embeddings": 16,
}
GEMMA4: dict[str, Any] = {
    "pad_token_id": 0,  # transformers wants one
    "sliding_window": 8,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 3.0,
    "use_bidirectional_attention": "vision",
}
# Architecture, and where it has several the family of the text part -> config class, text part, vision tower.
TINY: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "Gemma3Config",
        {
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 24,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {"image_size": 28, "patch_size": 14},
    ),
    "Gemma4ForConditionalGeneration": (
        "Gemma4Config",
        {**GEMMA4, "hidden_size_per_layer_input": 0},
        {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
    ),
    "Gemma4ForConditionalGeneration experts": (
        "Gemma4Config",
        {**GEMMA4, **GEMMA4_EXPERTS, "hidden_size_per_layer_input": 0},
        {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
    ),
    "Gemma4UnifiedForConditionalGeneration": (
        "Gemma4UnifiedConfig",
        GEMMA4,
        {
            **{"patch_size": 2, "pooling_kernel_size": 2, "mm_posemb_size": 8},
            **{"mm_embed_dim": 16, "output_proj_dims": 16},
        },
    ),
    "Mistral3ForConditionalGeneration": (
        "Mistral3Config",
        {"model_type": "mistral", "sliding_window": None, "rope_theta": 1e5},
        {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 8},
    ),
    "Mistral3ForConditionalGeneration ministral3": (
        "Mistral3Config",
        {
            "model_type": "ministral3",
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16,
                "max_position_embeddings": 512,
                "llama_4_scaling_beta": 0.4,
            },
        },
        {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 8},
    ),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        {"model_type": "llama", "rms_norm_eps": 1e-5},
        {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, "projection_dim": 16},
    ),
    "LlavaNextForConditionalGeneration": (
        "LlavaNextConfig",
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, "projection_dim": 16},
    ),
    "LlavaOnevisionForConditionalGeneration": (
        "LlavaOnevisionConfig",
        {"model_type": "qwen2", "rope_theta": 1e6},
        {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
    ),
    "InternVLForConditionalGeneration": (
        "InternVLConfig",
        {"model_type": "qwen3"},
        {"image_size": 28, "patch_size": 14},
    ),
    "Qwen2VLForConditionalGeneration": (
        "Qwen2VLConfig",
        {"rope_theta": 1e5, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "Qwen2_5_VLConfig",
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        {"depth": 1, "hidden_size": 16, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 24},
    ),
    "Qwen3VLForConditionalGeneration": (
        "Qwen3VLConfig",
        {"rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 3, 3]}},
        {
            "depth": 1,
            "hidden_size": 16,
            "out_hidden_size": 64,
            "num_heads": 2,
            "intermediate_size": 24,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "Qwen3VLMoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 3, 3]},
        },
        {**QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
    "Qwen3_5ForConditionalGeneration": (
        "Qwen3_5Config",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.5,
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
            },
        },
        QWEN_VISION,
    ),
    "Qwen3_5MoeForConditionalGeneration": (
        "Qwen3_5MoeConfig",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
            "mlp_only_layers": [],
        },
        QWEN_VISION,
    ),
    "Glm4vForConditionalGeneration": (
        "Glm4vConfig",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
        {"depth": 1, "hidden_size": 16, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 24},
    ),
}
TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def write_multimodal(folder: Path, architecture: str, *, tied: bool = False, **saving: Any) -> Path:
    """Write a random model in bfloat16 and a tokenizer, in the names that this transformers writes; returns the folder."""
    import transformers

    config_class, text, vision = TINY[architecture]
    text, vision = {**TEXT, **text}, vision if "depth" in vision else {**VISION, **vision}
    if architecture.startswith(("Qwen2", "Glm4v", "LlavaOnevision")):
        text.pop("head_dim")
    config = getattr(transformers, config_class)(
        text_config={**text, "tie_word_embeddings": tied}, vision_config=vision, tie_word_embeddings=tied
    )
    transformers.set_seed(0)
    model = getattr(transformers, architecture.partition(" ")[0])(config).to(torch.bfloat16)
    with torch.no_grad():
        for tensor in model.parameters():
            # Norms of one and biases of zero would hide mistakes.
            tensor.normal_(std=0.1) if tensor.dim() > 1 else tensor.add_(torch.randn_like(tensor) * 0.1)
        for name, tensor in model.named_buffers():
            if name.endswith("layer_scalar"):
                tensor.uniform_(0.5, 1.5)
    model.save_pretrained(folder, **saving)
    write_tokenizer(folder)
    return folder


def in_newer_names(folder: Path) -> None:
    """Call the tensors of a single file as the modules of transformers 5 are called."""
    path = folder / "model.safetensors"
    save_file({newer(name): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def exchange_experts(folder: Path) -> None:
    """Give the experts of a single file rows in the place of columns, as Qwen3-VL-30B-A3B is published."""
    path = folder / "model.safetensors"
    turned = {
        name: tensor.mT.contiguous() if ".mlp.experts." in name else tensor for name, tensor in load_file(path).items()
    }
    save_file(turned, path, {"format": "pt"})


def newer(name: str) -> str:
    """`model.language_model.` and `lm_head.`, whichever names a folder has."""
    if name.startswith("language_model."):
        name = name.removeprefix("language_model.")
        return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
    if name.startswith(("vision_tower.", "multi_modal_projector.", "visual.", "image_newline")):
        return f"model.{name}"
    if name.startswith("model.") and not name.startswith(
        (
            *("model.language_model.", "model.visual.", "model.vision_tower.", "model.multi_modal"),
            *("model.image_newline", "model.embed_vision.", "model.vision_embedder."),
        )
    ):
        return name.replace("model.", "model.language_model.", 1)
    return name


def text_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """[sequences, tokens, vocabulary] float32: what transformers computes with the folder's model for a text."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=ids).logits
    return logits
