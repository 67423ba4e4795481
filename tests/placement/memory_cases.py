"""Layouts of the real engine with their memory, measured on each rank and predicted. Used by the tests and by the benchmark."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.core.layout import Layout
from megarl.core.types import Column, MicroBatch, MiniBatch, Shard
from megarl.models.config import ModelConfig
from megarl.models.hf_config import parse_model_config
from megarl.placement.devices import DEVICES
from megarl.placement.memory import Role, RoleBytes, role_bytes
from megarl.placement.space import one_layout
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.roles import Lora, Optimizer
from megarl.recipe.section import Recompute
from megarl.training.rank import Rank
from megarl.training.spec import PolicyObjective, RoleSpec, ValueObjective
from tests.support.live_bytes import LiveBytes
from tests.support.tiny import tiny_config
from tests.training.samples import examples, shards

ROLE = "measured"
SEQUENCES = 2  # of a micro-batch, all as long
FEW = 16  # tokens of each before it counts
COMMON: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 1024,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "mlp_only_layers": []}
GATED = {**EXPERTS, "shared_expert_intermediate_size": 160}
LATENT = {
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
PARTLY_ROTATED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LOCAL = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64}
SINKS = {**LOCAL, "intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LINEAR = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# Name -> family, class in HF's config, what differs from COMMON.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dense": ("llama", "Llama", {}),
    "dense, many words": ("llama", "Llama", {"vocab_size": 8192}),
    "dense, qk norm": ("qwen3", "Qwen3", {}),
    "dense, growing queries": ("ministral3", "Ministral3", {}),
    "tied": ("qwen2", "Qwen2", {"tie_word_embeddings": True, "vocab_size": 4096}),
    "experts": ("qwen3_moe", "Qwen3Moe", EXPERTS),
    "experts, one gated": ("qwen2_moe", "Qwen2Moe", GATED),
    "latent": ("deepseek_v3", "DeepseekV3", LATENT),
    "neighbours rotated": ("glm4", "Glm4", {}),
    "partly rotated": ("glm4_moe", "Glm4Moe", PARTLY_ROTATED),
    "local": ("gemma3", "Gemma3", LOCAL),
    "layered heads": ("gemma4", "Gemma4", {**LOCAL, "global_head_dim": 32, "num_global_key_value_heads": 2}),
    "norms behind": ("olmo2", "Olmo2", {}),
    "layered heads, experts": (
        "gemma4",
        "Gemma4",
        {
            **{**LOCAL, "global_head_dim": 32, "num_global_key_value_heads": 2},
            **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 96},
        },
    ),
    "no positions, norms behind": ("exaone4", "Exaone4", LOCAL),
    "whole norms, experts": (
        "olmoe",
        "Olmoe",
        {"num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96},
    ),
    "bias behind attention": ("seed_oss", "SeedOss", {"attention_out_bias": True}),
    "whole norms, partly rotated": (
        "minimax_m2",
        "MiniMaxM2",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96, "rope_parameters": HALF},
    ),
    "learned activation": ("apertus", "Apertus", {}),
    "neighbours rotated, no norms behind": ("ernie4_5", "Ernie4_5", {}),
    "biased softmax": (
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 96, "moe_num_shared_experts": 2},
    ),
    "norms behind rotation": ("hunyuan_v1_dense", "HunYuanDenseV1", {}),
    "norms behind rotation, experts": (
        "hunyuan_v1_moe",
        "HunYuanMoEV1",
        {"num_experts": 8, "moe_topk": 2, "intermediate_size": 96},
    ),
    "sinks": ("gpt_oss", "GptOss", SINKS),
    "linear attention": ("qwen3_5", "Qwen3_5", LINEAR),
    "linear attention, experts": ("qwen3_5_moe", "Qwen3_5Moe", {**GATED, **LINEAR}),
}


@dataclass(frozen=True)
class Case:
    """A role of a model at a layout. tokens: of a micro-batch on one data-parallel rank. use: train; score
    (frozen); or both, log-probs as well as training."""

    model: str
    layout: Layout = field(default_factory=Layout)
    dtype: str = "float32"
    recompute: Recompute = "none"
    recompute_num_layers: int | None = None
    tokens: int = 512
    use: str = "train"
    head: bool = True
    lora: Lora | None = None

    @property
    def label(self) -> str:
        """All but the model."""
        said = [str(self.layout), self.dtype, f"{self.tokens} tokens"]
        some = f" of {self.recompute_num_layers} layers" if self.recompute_num_layers else ""
        said += [] if self.recompute == "none" else [f"recompute {self.recompute}{some}"]
        said += [] if self.head else ["score head"]
        said += ["frozen"] if self.use == "score" else []
        said += ["with log-probs"] if self.use == "both" else []
        said += [f"LoRA {self.lora.rank}"] if self.lora else []
        return ", ".join(said)

    @property
    def micro_batches(self) -> int:
        """Enough to fill a pipeline."""
        return 2 * self.layout.pp


@dataclass(frozen=True)
class Measured:
    """Bytes on one rank. peak: most at a time, state included."""

    weights: int
    gradients: int
    optimizer: int
    peak: int

    @property
    def state(self) -> int:
        return self.weights + self.gradients + self.optimizer


def settings(name: str) -> dict[str, Any]:
    """A model's config.json."""
    family, words, own = MODELS[name]
    kind = "Gemma3TextForCausalLM" if family == "gemma3" else f"{words}ForCausalLM"
    content: dict[str, Any] = tiny_config(family, **{**COMMON, **own}).to_dict()
    return content | {"architectures": ["Gemma3ForCausalLM" if family == "gemma3" else kind]}


def config_of(case: Case, root: Path) -> ModelConfig:
    """The model's description; writes its folder, where there is none yet, without weights."""
    path = folder_of(case, root) / "config.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings(case.model)))
    config = parse_model_config(json.loads(path.read_text()), path)
    return config if case.head else config.with_score_head()


def folder_of(case: Case, root: Path) -> Path:
    return root / case.model.replace(", ", "_").replace(" ", "_")


def measure(rank: Rank, case: Case, root: Path) -> Measured:
    """Run the role on this rank, as in a step: the second pass counts, when the optimizer has its state. Collective.

    The first is over few tokens.
    """
    config = config_of(case, root)
    trained = case.use != "score"
    spec = RoleSpec(
        folder_of(case, root),
        case.dtype,  # type: ignore[arg-type]
        optimizer=Optimizer(lr=1e-4) if trained else None,
        total_steps=100,
        objective=PolicyObjective(Algorithm()) if case.head else ValueObjective(),
        layout=case.layout,
        recompute=case.recompute,
        recompute_num_layers=case.recompute_num_layers,
        lora=case.lora,
        routing_replay=config.moe is not None,
        load_weights=False,
        head="vocabulary" if case.head else "score",
    )
    with LiveBytes() as live:
        rank.build(ROLE, spec)
        engine = rank.engine(ROLE)
        _fill(engine)
        for tokens in (FEW * SEQUENCES, case.tokens):
            part, given = _given(replace(case, tokens=tokens), config, engine.groups.place.dp)
            live.reset()
            if trained:
                rank.update(ROLE, part, given)
            if case.use != "train":
                (rank.logprobs if case.head else rank.values)(ROLE, part)
        held = engine._offload.device_bytes()
        return Measured(held["params"], held["grads"], held["optimizer"], live.peak)


def _given(case: Case, config: ModelConfig, dp: int) -> tuple[Shard, dict[str, Column]]:
    """What a data-parallel rank learns from."""
    lengths = [case.tokens // SEQUENCES] * (SEQUENCES * case.micro_batches * case.layout.dp)
    made = examples(lengths, config.vocab_size, taught=False)
    parts, columns = shards([made], case.layout.dp, case.micro_batches)
    given = columns[dp]
    if not case.head:
        given = {"values": given["advantages"], "returns": given["old_logprobs"]}
    return Shard(tuple(_dealt(mini, config) for mini in parts[dp].mini_batches)), given


def _dealt(mini: MiniBatch, config: ModelConfig) -> MiniBatch:
    """The same, with the tokens of every layer dealt to all experts in turn, as the prediction has it: a random router favours
    some."""
    if config.moe is None:
        return mini
    choices = np.arange(config.num_layers * config.moe.top_k)

    def routed(micro: MicroBatch) -> MicroBatch:
        experts = (np.arange(micro.num_tokens)[:, None] * config.moe.top_k + choices) % config.moe.num_experts
        return replace(micro, routing=experts.astype(np.int16))

    return MiniBatch(tuple(routed(micro) for micro in mini.micro_batches))


def _fill(engine: Any) -> None:
    """Random weights, the same in every run: the folder has none."""
    torch.manual_seed(1)
    with torch.no_grad():
        for chunk in engine._chunks:
            for parameter in chunk.parameters():
                parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(std=0.1)
    if engine._stepper is not None:
        engine._stepper.optimizer.reload_model_params()


def predict(case: Case, root: Path) -> RoleBytes:
    """What the planner says of the fullest rank."""
    role = Role(
        trained=case.use != "score",
        head=case.head,
        lora=case.lora,
        sequence=case.tokens // SEQUENCES,
        passes=case.use == "both",
    )
    choice = one_layout(case.layout, case.tokens, case.recompute, case.recompute_num_layers)
    each = 4 if case.dtype == "float32" else 2
    return role_bytes(config_of(case, root), choice, each, role, DEVICES["cpu"].kernels)
