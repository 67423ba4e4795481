"""What each process does for test_layouts: `<rank> <world_size> <port> <root>`.

For every case a model is built on Megatron, filled from its HF folder, and exported again; rank 0 saves what differs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.core.layout import Layout
from megarl.models.bootstrap import prepare_megatron
from megarl.models.config import ModelConfig
from megarl.models.hf_config import load_model_config
from megarl.models.layout_check import layout_problems
from tests.support.platforms import chosen
from tests.support.tiny import GEMMA4_EXPERTS, longrope

PLATFORM = chosen()
LINEAR = {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
# Name of a folder -> family and settings. Four layers, so that they can be assigned; a vocabulary that nothing divides.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "vocab_size": 97}),
    "qwen3": ("qwen3", {"vocab_size": 99}),
    "llama": ("llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {"vocab_size": 97}),
    "ministral3": ("ministral3", {"vocab_size": 97}),
    "qwen3_5": ("qwen3_5", LINEAR),
    "qwen3_5_moe": ("qwen3_5_moe", LINEAR | {"vocab_size": 97}),
    "qwen3_next": ("qwen3_next", LINEAR),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen2_moe": ("qwen2_moe", {"vocab_size": 97}),
    "phi3": ("phi3", longrope(0.75) | {"tie_word_embeddings": True}),
    "phi3-one-head": ("phi3", {"num_key_value_heads": 1, "vocab_size": 97}),
    "mixtral": ("mixtral", {"vocab_size": 101}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-direct": ("deepseek_v3", {"q_lora_rank": None, "vocab_size": 97}),
    "apertus": ("apertus", {"vocab_size": 97}),
    "deepseek_v2": ("deepseek_v2", {"vocab_size": 97}),
    "ernie4_5": ("ernie4_5", {"tie_word_embeddings": True, "vocab_size": 97}),
    "ernie4_5_moe": ("ernie4_5_moe", {"vocab_size": 97}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"vocab_size": 97}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"vocab_size": 97}),
    "glm4": ("glm4", {"vocab_size": 97}),
    "glm4_moe": ("glm4_moe", {"vocab_size": 97}),
    "glm4_moe_lite": ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}),
    "gpt_oss": ("gpt_oss", {"vocab_size": 97}),
    "granite": ("granite", {"vocab_size": 97}),
    "granitemoe": ("granitemoe", {"vocab_size": 97}),
    "olmo2": ("olmo2", {"num_key_value_heads": 4, "vocab_size": 97}),
    "olmo3": ("olmo3", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "exaone4": ("exaone4", {"layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size": 97}),
    "smollm3": ("smollm3", {"tie_word_embeddings": True}),
    "seed_oss": ("seed_oss", {"vocab_size": 97}),
    "minimax_m2": ("minimax_m2", {"vocab_size": 97}),
    "olmoe": ("olmoe", {"vocab_size": 97}),
    "gemma3": ("gemma3", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gemma4": ("gemma4", {"layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size": 97}),
    "gemma4-experts": ("gemma4", GEMMA4_EXPERTS),
}
LAYERS = 4
LAYOUTS: dict[int, list[Layout]] = {
    2: [
        Layout(tp=2, sequence_parallel=True, world_size=2),
        Layout(pp=2, world_size=2),
        Layout(pp=2, vpp=2, world_size=2),
        Layout(pp=2, first_stage_layers=1, world_size=2),
        Layout(ep=2, world_size=2),
        Layout(etp=2, world_size=2),
        Layout(cp=2, world_size=2),
    ],
    4: [
        Layout(tp=4, sequence_parallel=True, world_size=4),
        Layout(pp=4, world_size=4),
        Layout(tp=2, pp=2, vpp=2, sequence_parallel=True, world_size=4),
        Layout(tp=2, ep=2, etp=2, sequence_parallel=True, world_size=4),
        Layout(pp=2, ep=2, last_stage_layers=3, world_size=4),
    ],
}
BUCKET_BYTES = 1 << 15
# How layers come to stages, and copies of a model to ranks, is one code for all families: these show it, with a tied embedding,
# experts, latents, and layers of two kinds. The others are tried where their own tensors are cut, and in stages that take turns.
SOME = ("qwen2", "qwen3_moe", "deepseek_v3", "glm4_moe_lite", "gemma3")


def is_tried(name: str, layout: Layout) -> bool:
    """Whether the model's own tensors, or stages, are to be seen at this layout."""
    cuts_tensors = layout.pp == 1 and max(layout.tp, layout.ep, layout.etp) > 1
    return name in SOME or cuts_tensors or layout == Layout(pp=2, vpp=2, world_size=2)


def cases(world_size: int, root: Path) -> list[tuple[str, ModelConfig, Layout]]:
    """Every model at the layouts where it is tried, and which it can have."""
    configs = {name: load_model_config(root / name) for name in MODELS}
    return [
        (name, config, layout)
        for layout in LAYOUTS[world_size]
        for name, config in configs.items()
        if is_tried(name, layout) and not layout_problems(config, layout)
    ]


def exported(
    rank: int, config: ModelConfig, folder: Path, groups: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The model's tensors after HF -> layout -> HF, on rank 0: gathered, and as all ranks write them into one file."""
    from megarl.models.gpt import build_gpt
    from megarl.models.hf_gather import Gatherer, export_buckets
    from megarl.models.hf_pieces import Pieces
    from megarl.models.hf_weights import load_hf_weights

    layout = groups.layout
    with groups.active():
        chunks = build_gpt(config, layout, groups.collection, dtype=torch.float32, platform=PLATFORM)
        load_hf_weights(chunks, config, folder, layout, rank)
    gatherer = Gatherer(chunks, config, layout, rank, dist.group.WORLD)
    buckets = list(export_buckets(gatherer, BUCKET_BYTES))
    counts = [0] * layout.world_size
    dist.all_gather_object(counts, len(buckets))
    assert len(set(counts)) == 1, "every rank takes equally many buckets"
    assert rank == 0 or not any(buckets)
    assert len(buckets) > 2
    gathered = {name: tensor.cpu() for bucket in buckets for name, tensor in bucket}
    return gathered, written(Pieces(chunks, config, layout, rank, BUCKET_BYTES), rank, folder)


def written(pieces: Any, rank: int, folder: Path) -> dict[str, torch.Tensor]:
    """What all ranks write into the same memory, as rank 0 finds it there."""
    sizes = [bucket[-1].start + bucket[-1].nbytes for bucket in pieces.buckets]
    if rank == 0:
        (folder / "buckets").write_bytes(b"\xff" * sum(sizes))  # NaN where nobody writes
    dist.barrier()
    flats = torch.from_file(str(folder / "buckets"), shared=True, size=sum(sizes), dtype=torch.uint8).split(sizes)
    for number, flat in enumerate(flats):
        pieces.write(number, flat)
    dist.barrier()
    if rank != 0:
        return {}
    filled = zip(pieces.buckets, flats, strict=True)
    return {entry.name: entry.of(flat).clone() for bucket, flat in filled for entry in bucket}


def main() -> None:
    """Run the cases of this world size; rank 0 leaves the names of tensors that differ in `<world_size>.json`."""
    rank, world_size, port, root = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    prepare_megatron(PLATFORM)
    from megarl.training.parallel import close_ranks, join_ranks, make_groups

    join_ranks(rank, world_size, PLATFORM, "127.0.0.1", port, timeout_s=60)
    groups = {layout: make_groups(layout, timeout_s=60, seed=1) for layout in LAYOUTS[world_size]}
    differing: dict[str, list[str]] = {}
    for name, config, layout in cases(world_size, root):
        gathered, in_place = exported(rank, config, root / name, groups[layout])
        if rank == 0:
            expected = load_file(root / name / "model.safetensors")
            for how, found in {"": gathered, ", written in place": in_place}.items():
                both = sorted(expected.keys() & found.keys())
                wrong = [key for key in both if not torch.equal(found[key], expected[key])]
                differing[f"{name} at {layout}{how}"] = wrong + sorted(expected.keys() ^ found.keys())
    if rank == 0:
        (root / f"{world_size}.json").write_text(json.dumps(differing))
    close_ranks()
