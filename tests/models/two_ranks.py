"""What each of two processes does for test_two_ranks: `<rank> <world_size> <port> <root>`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megarl.core.layout import Layout
from megarl.models.bootstrap import prepare_megatron
from megarl.models.hf_config import load_model_config
from tests.support.platforms import chosen
from tests.support.tiny import GEMMA4_EXPERTS, longrope

PLATFORM = chosen()
TP, EP, ETP = Layout(tp=2, world_size=2), Layout(ep=2, world_size=2), Layout(etp=2, world_size=2)
# One key-value head for two ranks, and two; a vocabulary that two does not divide; each feature of the families cut.
CASES: dict[str, tuple[str, dict[str, Any], Layout]] = {
    "qwen3": ("qwen3", {"vocab_size": 97}, TP),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32, "num_key_value_heads": 1}, TP),
    "qwen3_5": ("qwen3_5", {"vocab_size": 97}, TP),
    "qwen3_5-one-head": ("qwen3_5", {"num_key_value_heads": 1, "linear_num_value_heads": 2}, TP),
    "qwen3_5_moe": ("qwen3_5_moe", {}, EP),
    "qwen3_next": ("qwen3_next", {"num_key_value_heads": 1}, ETP),
    "qwen2": ("qwen2", {}, TP),
    "qwen2-one-head": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1, "vocab_size": 97}, TP),
    "llama": ("llama", {}, TP),
    "ministral3": ("ministral3", {"num_key_value_heads": 1, "vocab_size": 97}, TP),
    "gemma3": ("gemma3", {}, TP),
    "gemma4": ("gemma4", {"vocab_size": 97}, TP),
    "gemma4-experts": ("gemma4", GEMMA4_EXPERTS, EP),
    "gemma4-own-values": ("gemma4", {"attention_k_eq_v": False, "num_key_value_heads": 1}, TP),
    "deepseek_v3-dense": ("deepseek_v3", {"first_k_dense_replace": 3, "num_hidden_layers": 2}, TP),
    "deepseek_v3": ("deepseek_v3", {"q_lora_rank": None}, EP),
    "apertus": ("apertus", {"num_key_value_heads": 1, "vocab_size": 97}, TP),
    "deepseek_v2": ("deepseek_v2", {}, EP),
    "ernie4_5": ("ernie4_5", {"num_key_value_heads": 1, "vocab_size": 97}, TP),
    "ernie4_5_moe": ("ernie4_5_moe", {}, EP),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"num_key_value_heads": 1, "vocab_size": 97}, TP),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {}, ETP),
    "glm4": ("glm4", {"num_key_value_heads": 1, "vocab_size": 97}, TP),
    "glm4_moe-dense": ("glm4_moe", {"first_k_dense_replace": 3, "num_key_value_heads": 1}, TP),
    "glm4_moe": ("glm4_moe", {}, EP),
    "glm4_moe_lite": ("glm4_moe_lite", {}, EP),
    "qwen3_moe": ("qwen3_moe", {}, EP),
    "qwen3_moe-etp": ("qwen3_moe", {}, ETP),
    "qwen2_moe": ("qwen2_moe", {}, EP),
    "qwen2_moe-etp": ("qwen2_moe", {}, ETP),
    "phi3": ("phi3", longrope(0.75) | {"vocab_size": 97}, TP),
    "phi3-one-head": ("phi3", {"num_key_value_heads": 1}, TP),
    "mixtral": ("mixtral", {}, ETP),
    "gpt_oss": ("gpt_oss", {}, EP),
    "granite": ("granite", {"vocab_size": 97}, TP),
    "granitemoe": ("granitemoe", {}, ETP),
    "olmo2": ("olmo2", {"vocab_size": 97}, TP),
    "olmo3": ("olmo3", {"num_key_value_heads": 4}, TP),
    "exaone4": ("exaone4", {"num_key_value_heads": 1, "vocab_size": 97}, TP),
    "smollm3": ("smollm3", {"num_key_value_heads": 1}, TP),
    "seed_oss": ("seed_oss", {"num_key_value_heads": 1}, TP),
    "minimax_m2": ("minimax_m2", {}, EP),
    "olmoe": ("olmoe", {}, EP),
}
CHUNK = 3
SEQUENCES = (1, 2)  # of a pack, in units of 4 chunks: each sequence is cut in 2 x CP


def attention_inputs() -> tuple[torch.Tensor, ...]:
    """Queries, keys, values and the gradient of the output: [t, heads, 8] in float64; bounds [S + 1]."""
    random = torch.Generator().manual_seed(5)
    lengths = [4 * CHUNK * size for size in SEQUENCES]
    tensors = [torch.randn(sum(lengths), heads, 8, generator=random, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    return (*tensors, torch.tensor([0, *lengths]).cumsum(0).int())


def held_by(rank: int) -> list[int]:
    """Positions of the pack that a rank of two holds: of each sequence the chunks `rank` and 3 - rank."""
    positions, start = [], 0
    for size in SEQUENCES:
        length = CHUNK * size
        for chunk in (rank, 3 - rank):
            positions += range(start + chunk * length, start + (chunk + 1) * length)
        start += 4 * length
    return positions


def context_parallel(rank: int) -> dict[str, torch.Tensor]:
    """Attention over this rank's chunks, packed and dense, and its gradients."""
    from megarl.models.attention import CoreAttention
    from megarl.models.packed import packed_params

    attention = CoreAttention(
        SimpleNamespace(kv_channels=8, window_size=None, window_attn_skip_freq=None, softmax_type="vanilla"),  # type: ignore[arg-type]
        1,
        None,
        "self",
        pg_collection=SimpleNamespace(cp=dist.group.WORLD),
    )
    *tensors, bounds = (tensor.to(PLATFORM.device) for tensor in attention_inputs())
    held = held_by(rank)
    query, key, value = (tensor[held].requires_grad_() for tensor in tensors[:3])
    output = attention(query, key, value, packed_seq_params=packed_params(bounds, cp=2))[:, 0]
    (output * tensors[3][held].flatten(1)).sum().backward()
    assert query.grad is not None
    assert key.grad is not None
    assert value.grad is not None
    first = held[: 2 * CHUNK * SEQUENCES[0]]
    dense = attention(*(tensor[first][:, None] for tensor in tensors[:3]))[:, 0]
    grads = {"query": query.grad, "key": key.grad, "value": value.grad}
    found = {"output": output.detach(), "dense": dense, **grads}
    return {name: tensor.cpu() for name, tensor in found.items()}


def logits_of(rank: int, name: str, folder: Path, groups: Any) -> torch.Tensor:
    """This rank's columns of the logits of a case."""
    from megarl.models.gpt import build_gpt
    from megarl.models.hf_weights import load_hf_weights
    from tests.models.parity import megatron_logits

    config = load_model_config(folder)
    with groups.active():
        [model] = build_gpt(config, groups.layout, groups.collection, dtype=torch.float32, platform=PLATFORM)
        load_hf_weights([model], config, folder, groups.layout, rank)
        return megatron_logits(model.eval(), config.vocab_size)


def main() -> None:
    """Run all cases and the attention, and leave the results in `rank<rank>.pt`."""
    rank, world_size, port, root = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    prepare_megatron(PLATFORM)
    from megarl.training.parallel import close_ranks, join_ranks, make_groups

    join_ranks(rank, world_size, PLATFORM, "127.0.0.1", port, timeout_s=60)
    groups = {layout: make_groups(layout, timeout_s=60, seed=1) for layout in (TP, EP, ETP)}
    logits = {name: logits_of(rank, name, root / name, groups[layout]) for name, (_, _, layout) in CASES.items()}
    torch.save({"logits": logits, "cp": context_parallel(rank)}, root / f"rank{rank}.pt")
    close_ranks()
