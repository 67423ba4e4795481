"""Recipes for published models: from their config.json alone, every layout can be, nodes match, and a plan fits in memory.

The sizes are those of the models' own config.json; nothing of the recipes was ever run.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megarl
from megarl.core.platform import get_platform
from megarl.launch.submit import SlurmOptions, check_fit
from megarl.models.layout_check import check_layout
from megarl.placement.cluster import make_cluster
from megarl.placement.memory import role_bytes
from megarl.placement.plan import make_plan
from megarl.placement.space import RECOMPUTE, Layouts
from megarl.placement.workload import read_model, recipe_workload
from megarl.recipe.layouts import role_layouts
from megarl.recipe.load import load_recipe

RECIPES = Path(megarl.__file__).parent.parent / "recipes"
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": 151645,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_4b_grpo_8": {
        **QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3_30b_a3b_grpo_32": {
        **QWEN3,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "llama31_70b_ppo_128": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "eos_token_id": 128009,
    },
    "deepseek_v3_moe_512": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    },
}
DEVICES = {"deepseek_v3_moe_512": "H200"}


@dataclass(frozen=True)
class Case:
    """A recipe, its model's folder, and the nodes that its own words ask for."""

    name: str
    model: Path
    nodes: int

    @property
    def recipe(self) -> Any:
        file = RECIPES / f"{self.name}.yaml"
        # A reward model has the policy's sizes.
        scored = [f"reward_model.path={self.model}"] if "\nreward_model:" in file.read_text() else []
        return load_recipe(file, [f"model.path={self.model}", *scored]).recipe


@pytest.fixture(params=CONFIGS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[request.param]))
    nodes = re.search(r"--nodes (\d+)", (RECIPES / f"{request.param}.yaml").read_text())
    assert nodes
    return Case(request.param, tmp_path, int(nodes[1]))


def test_every_role_can_be_laid_out(case: Case) -> None:
    model = read_model(case.model)
    for role, layout in role_layouts(case.recipe).items():
        check_layout(model, layout, role)
    rollout = case.recipe.rollout
    assert model.num_heads % rollout.tp == 0 and model.ffn_hidden_size % rollout.tp == 0


def test_the_nodes_of_its_own_words_are_what_it_uses(case: Case) -> None:
    options = SlurmOptions(nodes=case.nodes, gpus_per_node=8)
    assert check_fit(case.recipe, get_platform("cuda"), options) == 8
    assert case.name.endswith(f"_{case.nodes * 8}")


def test_its_own_layout_fits_in_memory(case: Case) -> None:
    """What all roles keep on a device, and the most that one of them works with, by the planner's model."""
    recipe, config = case.recipe, read_model(case.model)
    cluster = make_cluster(DEVICES.get(case.name, "H100"), case.nodes)
    kept = working = 0.0
    for role, layout in role_layouts(recipe).items():
        section = getattr(recipe, role)
        choice = Layouts(
            *(np.array([size]) for size in (layout.world_size, layout.tp, layout.pp, layout.cp, layout.ep)),
            micro_tokens=np.array([recipe.actor.micro_batch_tokens]),
            recompute=np.array([RECOMPUTE.index(recipe.actor.recompute)]),
        )
        held = role_bytes(config, choice, 2, trained=role in ("actor", "critic"), head=role in ("actor", "reference"))
        state = float(held.state[0])
        kept += state if not section.offload else 0.0
        working = max(working, float(held.working[0]) + (state if section.offload else 0.0))
    assert kept + working < cluster.usable_bytes


def test_a_plan_for_these_devices_fits_in_their_memory(case: Case) -> None:
    cluster = make_cluster(DEVICES.get(case.name, "H100"), case.nodes)
    assert cluster.num_devices == case.nodes * 8
    plan = make_plan(recipe_workload(case.recipe, read_model(case.model)), cluster, top=1)
    assert plan.best.step_s > 0
