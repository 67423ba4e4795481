"""Models and workloads of known sizes for the tests of this room."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.models.config import Mla, ModelConfig, Moe, Rope
from megarl.placement.lengths import lognormal
from megarl.placement.workload import ACTOR, CRITIC, REFERENCE, REWARD, ROLLOUT, Workload

GRPO = (ACTOR, ROLLOUT, REFERENCE)
PPO = (ACTOR, ROLLOUT, REFERENCE, CRITIC, REWARD)


def model(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, *, tied: bool = False, **more: object
) -> ModelConfig:
    values: dict[str, object] = {
        "family": "test",
        "architecture": "Test",
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": hidden // heads,
        "ffn_hidden_size": ffn,
        "vocab_size": vocab,
        "max_positions": 32768,
        "rope": Rope(1e4),
        "norm_eps": 1e-6,
        "tied_embeddings": tied,
        "qkv_bias": False,
        "qk_norm": False,
        "eos_token_ids": (0,),
        **more,
    }
    return ModelConfig(**values)  # type: ignore[arg-type]


LLAMA_7B = model(32, 4096, 32, 32, 11008, 32000)
QWEN_7B = model(28, 3584, 28, 4, 18944, 152064)
QWEN_30B_A3B = model(
    48,
    2048,
    32,
    4,
    6144,
    151936,
    head_dim=128,
    moe=Moe(num_experts=128, top_k=8, ffn_hidden_size=768),
    moe_layers=frozenset(range(48)),
)
LATENT = model(4, 512, 8, 8, 1024, 1000, head_dim=48, mla=Mla(None, 128, 32, 16, 32))


def workload(config: ModelConfig = LLAMA_7B, roles: tuple[str, ...] = PPO, **more: object) -> Workload:
    values: dict[str, object] = {
        "models": dict.fromkeys(roles, config),
        "prompts": 1024,
        "samples_per_prompt": 1,
        "mini_batches": 8,
        "prompt_tokens": 512.0,
        "responses": lognormal(600, 0.5, 1024),
        "longest_sample": 2048,
        "micro_tokens": (2048, 4096, 8192),
        **more,
    }
    return Workload(**values)  # type: ignore[arg-type]


def write_config(
    folder: Path, *, layers: int = 28, hidden: int = 3584, heads: int = 28, ffn: int = 18944, vocab: int = 152064
) -> Path:
    """The config.json of a Qwen2, all that a plan reads of a model; the folder. Default: the 7B."""
    values = {
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2 if heads < 16 else 4,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder
