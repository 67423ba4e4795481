"""What each of two processes does for test_two_ranks: `-m tests.models.two_ranks <rank> <port> <root>`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megarl.core.platform import get_platform
from megarl.models.bootstrap import prepare_megatron
from megarl.models.hf_config import load_model_config
from megarl.core.layout import Layout

CPU = get_platform("cpu")
# Two key-value heads for two ranks; a vocabulary that two does not divide; every form of the families.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"vocab_size": 97}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4, "vocab_size": 97}),
    "llama": ("llama", {}),
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
    from megarl.models.gpt import packed_params

    attention = CoreAttention(
        SimpleNamespace(kv_channels=8),  # type: ignore[arg-type]
        1,
        None,
        "self",
        pg_collection=SimpleNamespace(cp=dist.group.WORLD),
    )
    *tensors, bounds = attention_inputs()
    held = held_by(rank)
    query, key, value = (tensor[held].requires_grad_() for tensor in tensors[:3])
    output = attention(query, key, value, packed_seq_params=packed_params(bounds))[:, 0]
    (output * tensors[3][held].flatten(1)).sum().backward()
    assert query.grad is not None
    assert key.grad is not None
    assert value.grad is not None
    first = held[: 2 * CHUNK * SEQUENCES[0]]
    dense = attention(*(tensor[first][:, None] for tensor in tensors[:3]))[:, 0]
    grads = {"query": query.grad, "key": key.grad, "value": value.grad}
    return {"output": output.detach(), "dense": dense, **grads}


def tensor_parallel(rank: int, root: Path, tp: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """For each case this rank's columns of the logits; the models are exported to `<case>-exported`."""
    from megarl.models.gpt import build_gpt
    from megarl.models.hf_weights import export_buckets, load_hf_weights, save_hf
    from tests.models.parity import megatron_logits

    logits = {}
    for name in CASES:
        config = load_model_config(root / name)
        model = build_gpt(config, tp=2, dtype=torch.float32, platform=CPU).eval()
        load_hf_weights(model, config, root / name, rank, 2)
        logits[name] = megatron_logits(model, config.vocab_size)
        buckets = export_buckets(model, config, tp, 1 << 14)
        if rank == 0:
            save_hf(buckets, config, root / name, root / f"{name}-exported")
        else:
            assert sum(len(bucket) for bucket in buckets) > 0
    return logits


def main() -> None:
    """Run both, and leave the results in `rank<rank>.pt`."""
    rank, port, root = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    prepare_megatron(CPU)
    from megarl.training.parallel import close_parallel, init_parallel

    groups = init_parallel(rank, Layout(tp=2, world_size=2), CPU, "127.0.0.1", port, timeout_s=60, seed=1)
    results = {"tp": tensor_parallel(rank, root, groups.tp), "cp": context_parallel(rank)}
    torch.save(results, root / f"rank{rank}.pt")
    close_parallel()


if __name__ == "__main__":
    main()
