"""Apertus: what of its configs megarl reads as transformers does, and the activation that learns, by itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import ApertusConfig
from transformers.activations import XIELUActivation

from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.models.config import Rope
from megarl.models.flops import forward_flops
from megarl.models.gpt import build_gpt
from megarl.models.hf_config import load_model_config
from megarl.models.hf_weights import load_hf_weights
from megarl.models.rules import expected_tensors
from megarl.models.xielu import Xielu
from megarl.training.parallel import Groups
from tests.models.test_families import SIZES, of, parse
from tests.support.platforms import chosen
from tests.support.tiny import write_tiny_model

PLATFORM = chosen()
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# As Apertus-8B-Instruct-2509's, but for the number of layers.
APERTUS: dict[str, Any] = {
    **SIZES,
    "architectures": ["ApertusForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 68, 72],
    "hidden_act": "xielu",
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "model_type": "apertus",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "pad_token_id": 3,
    "post_norm": False,
    "qk_norm": True,
    "rope_scaling": LLAMA3,
    "rope_theta": 12000000,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}
ROPE = Rope(12e6, "llama3", factor=8.0, original_positions=8192)


def test_apertus() -> None:
    config = parse(APERTUS)
    assert (config.family, config.head_dim, config.rope, config.pad_token_id) == ("apertus", 128, ROPE, 3)
    assert (config.activation, config.halves, config.qk_norm, config.post_norms) == ("xielu", 1, True, False)
    tensors = expected_tensors(config)
    prefix = "model.layers.5."
    assert {
        name.removeprefix(prefix): shape for name, shape in tensors.items() if name.startswith(f"{prefix}mlp.")
    } == {
        "mlp.up_proj.weight": (21504, 4096),
        "mlp.down_proj.weight": (4096, 21504),
        "mlp.act_fn.alpha_p": (1,),
        "mlp.act_fn.alpha_n": (1,),
        "mlp.act_fn.beta": (),
        "mlp.act_fn.eps": (),
    }
    assert forward_flops(config, [1]).mlp == 2 * 6 * 2 * 4096 * 21504
    theirs, absent = ApertusConfig(), of("ApertusForCausalLM")
    assert absent.rope == ROPE == Rope(theirs.rope_parameters["rope_theta"], "llama3", 8.0, 8192)
    assert (absent.pad_token_id, absent.eos_token_ids) == (theirs.pad_token_id, (theirs.eos_token_id,))
    assert of("ApertusForCausalLM", rope_theta=1e4, rope_scaling=None).rope.theta == 12e6
    assert ApertusConfig(rope_theta=1e4).rope_parameters["rope_theta"] == 12e6


@pytest.fixture
def groups_of_one(one_rank: Groups) -> Any:
    return one_rank.collection.tp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_activation_and_its_gradients_are_transformers(groups_of_one: Any, dtype: torch.dtype) -> None:
    theirs = XIELUActivation(alpha_p_init=0.9, alpha_n_init=0.7, dtype=dtype)
    config: Any = SimpleNamespace(params_dtype=dtype)
    ours = Xielu(config, groups_of_one)
    ours.load_state_dict({name: value.reshape(1).clone() for name, value in theirs.state_dict().items()})
    x = torch.linspace(-3, 3, 301, dtype=dtype).view(7, 43)
    x[0, :4] = torch.tensor([0.0, -1e-7, -1e-6, 1e-7])
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for each, module in zip(inputs, (ours, theirs), strict=True):
        module(each).square().sum().backward()
    assert torch.equal(ours(x), theirs(x)) and ours(x).dtype == dtype
    assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
    for name in ("alpha_p", "alpha_n"):
        assert torch.equal(getattr(ours, name).grad, getattr(theirs, name).grad)


def test_what_does_not_learn_keeps_its_bits(one_rank: Groups, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "apertus")
    config = load_model_config(tmp_path)
    [model] = build_gpt(config, Layout(), one_rank.collection, dtype=torch.bfloat16, platform=PLATFORM)
    load_hf_weights([model], config, tmp_path, Layout(), 0)
    activation = model.bfloat16().decoder.layers[1].mlp.activation_func
    stored = load_file(tmp_path / "model.safetensors")
    for name in ("beta", "eps"):
        held, written = getattr(activation, name), stored[f"model.layers.1.mlp.act_fn.{name}"]
        assert held.dtype == torch.float32 and held.cpu() == written
    assert activation.alpha_p.dtype == torch.bfloat16
    assert {name for name, _ in activation.named_parameters()} == {"alpha_p", "alpha_n"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "silu"}, r"hidden_act='silu' \(another activation\)"),
        ({"attention_bias": True}, r"attention_bias=True \(biases in attention\)"),
        ({"mlp_bias": True}, r"mlp_bias=True"),
        ({"post_norm": True}, r"post_norm=True \(norms behind attention and MLP\)"),
        ({"qk_norm": False}, r"qk_norm=False"),
        ({"head_dim": None}, r"head_dim is None"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"RoPE scaling of type 'dynamic' is not supported"),
    ],
)
def test_what_it_is_refused_for(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(APERTUS, **changes)
