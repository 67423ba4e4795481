"""Configs of DeepSeek-V2: what of them megarl reads, how tokens come to its experts, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV2Config

from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.models.config import Mla, Moe, Rope
from megarl.models.gpt import build_gpt, transformer_config
from megarl.models.hf_config import load_model_config
from megarl.models.hf_weights import load_hf_weights
from megarl.models.rope import magnitude
from megarl.serving.server_models import missing_settings
from megarl.training.parallel import Groups
from tests.models.parity import LENGTHS, megatron_logits, packed_tokens
from tests.models.test_families import SIZES, parse
from tests.support.platforms import chosen
from tests.support.tiny import write_tiny_model
from tests.support.tolerances import Tolerance

SCALING: dict[str, Any] = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
# As DeepSeek-V2-Lite's, but for the number of layers.
LITE: dict[str, Any] = {
    **SIZES,
    "architectures": ["DeepseekV2ForCausalLM"],
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": SCALING,
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
# What differs of DeepSeek-V2 and Coder-V2.
LARGE: dict[str, Any] = {
    "q_lora_rank": 1536,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 160,
    "n_group": 8,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 16.0,
}
ROPE = Rope(1e4, "yarn", factor=40.0, original_positions=4096, mscale=0.707, mscale_all_dim=0.707)
GROUPED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}


def test_deepseek_v2() -> None:
    config = parse(LITE)
    assert (config.family, config.head_dim, config.rope) == ("deepseek_v2", 192, ROPE)
    assert config.mla == Mla(None, 512, 128, 64, 128)
    assert config.moe_layers == set(range(1, 6))
    assert config.moe == Moe(64, 6, 1408, shared_ffn_hidden_size=2816, normalize=False, best_of_group=True)
    large = parse(LITE, **LARGE).moe
    assert large == Moe(
        160,
        6,
        1408,
        shared_ffn_hidden_size=2816,
        normalize=False,
        scaling_factor=16.0,
        num_groups=8,
        top_groups=3,
        best_of_group=True,
    )
    assert parse(LITE, n_group=None, topk_group=None, topk_method="absent").moe == config.moe
    theirs = DeepseekV2Config()
    absent = parse(LITE, eos_token_id="absent", tie_word_embeddings="absent")
    assert (list(absent.eos_token_ids), absent.tied_embeddings) == ([theirs.eos_token_id], theirs.tie_word_embeddings)
    assert absent.pad_token_id == theirs.pad_token_id


def test_logits_are_scaled_as_they_were_trained() -> None:
    """By the square of yarn's magnitude, as DeepSeek's own code and SGLang have it; transformers 5.12 leaves that out."""
    settings = transformer_config(parse(LITE), Layout(), dtype=torch.float32, platform=chosen())
    assert settings.softmax_scale == pytest.approx(192**-0.5 * magnitude(40.0, 0.707) ** 2)
    assert magnitude(40.0, 0.707) == pytest.approx(1.2608, abs=1e-4)


def test_yarn_is_transformers_but_for_the_scale_of_the_logits(
    one_rank: Groups, bounds: Tolerance, tmp_path: Path
) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
    rope |= {"mscale": 0.7, "mscale_all_dim": 1.4}
    write_tiny_model(tmp_path, "deepseek_v2", rope_parameters=rope)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for layer in theirs.model.layers:
        layer.self_attn.scaling *= magnitude(4.0, 1.4) ** 2
    assert (ours(tmp_path, one_rank) - logprobs(theirs)).abs().max().item() < bounds.logprob


def ours(folder: Path, groups: Groups) -> Tensor:
    config = load_model_config(folder)
    [model] = build_gpt(config, Layout(), groups.collection, dtype=torch.float32, platform=chosen())
    load_hf_weights([model], config, folder, Layout(), 0)
    return megatron_logits(model.eval(), 128).log_softmax(-1)


def logprobs(model: Any) -> Tensor:
    tokens = packed_tokens(128)[0]
    with torch.no_grad():
        return torch.cat([model(part[None]).logits[0].log_softmax(-1) for part in tokens.split(LENGTHS)])


def test_experts_of_the_groups_with_the_best_ones(one_rank: Groups, bounds: Tolerance, tmp_path: Path) -> None:
    """transformers 5.12 has this choice in its code, and ends over a name that it has not set: here it is given."""
    write_tiny_model(tmp_path, "deepseek_v2", **GROUPED)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with pytest.raises(AttributeError, match="num_experts"):
        logprobs(theirs)
    for layer in theirs.model.layers[1:]:
        layer.mlp.num_experts = 8
    found = ours(tmp_path, one_rank)
    assert (found - logprobs(theirs)).abs().max().item() < bounds.logprob
    for layer in theirs.model.layers[1:]:
        layer.mlp.topk_method = "greedy"
    assert (found - logprobs(theirs)).abs().max().item() > 100 * bounds.logprob


def test_servers_are_told_what_transformers_does_not_write(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "deepseek_v2", tokenizer=False)
    assert missing_settings(folder) == {"moe_layer_freq": 1, "scoring_func": "softmax"}
    assert not any(hasattr(AutoConfig.from_pretrained(folder), key) for key in ("moe_layer_freq", "scoring_func"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"norm_topk_prob": True}, r"norm_topk_prob=True \(scores that are divided by their sum\)"),
        ({"scoring_func": "sigmoid"}, r"scoring_func='sigmoid'"),
        ({"topk_method": "noaux_tc"}, r"topk_method is 'noaux_tc'; 'greedy' or 'group_limited_greedy' is wanted"),
        (
            {"n_group": 8, "topk_group": 3},
            r"topk_group is 3; 8, as n_group has it, is wanted: where topk_method is 'greedy'",
        ),
        (LARGE | {"n_group": 7}, r"n_group=7, which does not divide 160 experts"),
        (LARGE | {"topk_group": 9}, r"n_group=8 and topk_group=9"),
        (LARGE | {"topk_group": 1, "num_experts_per_tok": 21}, r"the groups that are chosen have fewer"),
        ({"moe_layer_freq": 2}, r"moe_layer_freq=2"),
        ({"attention_bias": True}, r"attention_bias=True"),
    ],
)
def test_what_it_is_refused_for(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(LITE, **changes)
