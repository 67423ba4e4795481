"""Writes a tiny random Qwen2-VL, Qwen2.5-VL, Qwen3-VL or Qwen3.5 in HF format, and a tokenizer with tokens for images.

For the task of `make_colors.py` and for tests: nothing is downloaded, and the same options give the same bytes. The tower is as
random as the rest, and what it makes of an image is there for the text part to read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from tools.make_tiny_model import INITIALIZER_RANGE, VOCAB_MULTIPLE, make_tokenizer

IMAGE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
VIDEO = "<|video_pad|>"  # configs name one
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '" + "".join(IMAGE) + "' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ARCHITECTURES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
CONFIGS = {
    "qwen2_vl": "Qwen2VLConfig",
    "qwen2_5_vl": "Qwen2_5_VLConfig",
    "qwen3_vl": "Qwen3VLConfig",
    "qwen3_vl_moe": "Qwen3VLMoeConfig",
    "qwen3_5": "Qwen3_5Config",
    "qwen3_5_moe": "Qwen3_5MoeConfig",
}
PATCH = {kind: 14 if kind.startswith("qwen2") else 16 for kind in ARCHITECTURES}
UNTIED = ("qwen3_vl_moe",)  # as published, and as SGLang builds it in any case
MERGE = 2  # patches of a token's side
HEAD, KV_HEADS = 32, 2
AXES = [6, 5, 5]  # of a head's 16 frequencies: time, row, column
HALF_AXES = [3, 3, 2]  # of 8, where half of a head turns
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
Kind = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]


def make_vision_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny model's, whose chat template has places for images."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *IMAGE, VIDEO]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _config(kind: Kind, tokenizer: PreTrainedTokenizerFast, *, hidden_size: int, layers: int, context: int) -> Any:
    import transformers

    start, image, end, video = tokenizer.convert_tokens_to_ids([*IMAGE, VIDEO])
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": AXES}
    text = {
        "vocab_size": -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden_size // HEAD,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": context,
        "initializer_range": INITIALIZER_RANGE,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": kind not in UNTIED,
    }
    tower: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": hidden_size,
        "patch_size": PATCH[kind],
        "spatial_merge_size": MERGE,
        "initializer_range": INITIALIZER_RANGE,
    }
    if kind == "qwen2_vl":
        tower |= {"embed_dim": tower["hidden_size"], "mlp_ratio": 2, "hidden_size": hidden_size}
    elif kind == "qwen2_5_vl":
        tower |= {"fullatt_block_indexes": [1], "window_size": 112}
    else:
        text, rope["mrope_interleaved"] = text | {"head_dim": HEAD}, True
    if kind.startswith("qwen3_vl"):
        tower |= {"deepstack_visual_indexes": [0, 1]}
    if kind.startswith("qwen3_5"):
        rope |= {"partial_rotary_factor": 0.5, "mrope_section": HALF_AXES}
        text |= DELTA | {"layer_types": (["linear_attention", "full_attention"] * layers)[:layers]}
    if kind.endswith("_moe"):
        width = hidden_size // 4 * 3
        text |= EXPERTS | {"moe_intermediate_size": width, "shared_expert_intermediate_size": width}
    make = getattr(transformers, CONFIGS[kind])
    tokens = {"image_token_id": image, "video_token_id": video}
    tokens |= {"vision_start_token_id": start, "vision_end_token_id": end}
    return make(
        text_config=text, vision_config=tower, **tokens, tie_word_embeddings=kind not in UNTIED, dtype="float32"
    )


def make_tiny_vision_model(
    folder: Path,
    *,
    kind: Kind = "qwen2_5_vl",
    seed: int = 1,
    hidden_size: int = 128,
    layers: int = 2,
    context: int = 512,
) -> int:
    """Write config, tokenizer, image processor's settings and random weights (float32); returns the parameter count.

    The same arguments give the same bytes. Torch's global random state is left as it was. Raises ValueError for a width that is
    not a multiple of 64: a head has 32, and there are two for each of keys and values.
    """
    if hidden_size % (KV_HEADS * HEAD):
        raise ValueError(f"hidden_size={hidden_size} is no multiple of {KV_HEADS * HEAD}")
    import transformers

    tokenizer = make_vision_tokenizer()
    config = _config(kind, tokenizer, hidden_size=hidden_size, layers=layers, context=context)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, ARCHITECTURES[kind])(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if kind == "qwen3_vl_moe":
        _exchange_experts(folder / "model.safetensors")
    tokenizer.save_pretrained(folder)
    square = PATCH[kind] * MERGE
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor" if kind.startswith("qwen2") else "Qwen3VLProcessor",
        "size": {"shortest_edge": square**2, "longest_edge": 64 * square**2},
        "patch_size": PATCH[kind],
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return int(model.num_parameters())


def _exchange_experts(path: Path) -> None:
    """Give experts rows in the place of columns, as they are published, and as SGLang takes them."""
    tensors = load_file(path)
    turned = {name: each.mT.contiguous() if ".experts." in name else each for name, each in tensors.items()}
    save_file(turned, path, {"format": "pt"})


def main(
    *,
    out: Annotated[Path, typer.Option(help="Folder to write; made if missing, overwritten if there.")],
    kind: Annotated[str, typer.Option(help=f"{', '.join(ARCHITECTURES)}.")] = "qwen2_5_vl",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights. The same seed gives the same bytes.")] = 1,
    hidden_size: Annotated[int, typer.Option(min=64, help="Width of the text part's residual stream.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the text part.")] = 2,
    context: Annotated[int, typer.Option(min=64, help="Longest sequence, in tokens.")] = 512,
) -> None:
    """Write a tiny random model that sees images.

    Example: python -m tools.make_tiny_vision_model --out .cache/colors/model
    """
    disable_progress_bar()
    if kind not in PATCH:
        raise typer.BadParameter(f"{kind!r}: allowed are {', '.join(PATCH)}")
    sizes = {"hidden_size": hidden_size, "layers": layers, "context": context}
    try:
        parameters = make_tiny_vision_model(out, kind=kind, seed=seed, **sizes)  # type: ignore[arg-type]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{out}: {ARCHITECTURES[kind]}, {parameters / 1e6:.2f}M random parameters, seed {seed}")


if __name__ == "__main__":
    typer.run(main)
