"""Which weights are FP8 at a server, held against SGLang's own models; and which models a server cannot hold so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.core.errors import UserError
from megarl.models.config import ModelConfig
from megarl.models.fp8_quantize import quantize
from megarl.models.fp8_weights import (
    BLOCK,
    KEY_FAMILIES,
    LINEAR_FAMILIES,
    STACKED_FAMILIES,
    UNSCALED_FAMILIES,
    blocks,
    check_servable,
    quantised,
)
from megarl.models.hf_config import load_model_config
from megarl.models.hf_fp8 import scale_name
from megarl.models.known_configs import FOLDER
from megarl.models.rules import expected_tensors
from megarl.placement.workload import read_model
from megarl.serving.server import ServerSpec
from megarl.serving.server_models import missing_settings
from megarl.sync.held import held_by
from tests.support.fp8_models import write_wide
from tests.support.sglang_fp8 import loaded_by_sglang
from tests.support.tiny import CONFIGS, write_tiny_model

KNOWN = sorted(str(path.parent.relative_to(FOLDER)) for path in FOLDER.rglob("config.json"))
BUFFERS = ("correction_bias", "act_fn.beta", "act_fn.eps")
REFUSED = (*STACKED_FAMILIES, *LINEAR_FAMILIES, *KEY_FAMILIES)
FAMILIES = [family for family in CONFIGS if family not in REFUSED]


def wide(folder: Path, family: str) -> Path:
    """With what SGLang asks of a config, and transformers does not write."""
    write_wide(folder, family)
    file = folder / "config.json"
    told = {key: value for key, value in missing_settings(folder).items() if key != "architectures"}  # which flags say
    file.write_text(json.dumps(json.loads(file.read_text()) | told))
    return folder


def sent(folder: Path) -> dict[str, Tensor]:
    """A model as it goes to servers."""
    config = load_model_config(folder)
    scales, found = quantised(config), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name in scales:
            found[name], found[scale_name(name)] = quantize(tensor.bfloat16())
        elif name in expected_tensors(config):
            found[name] = tensor if name.endswith(BUFFERS) else tensor.bfloat16()
    return found


def as_held(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same under the engine's names, on its only rank: [numbers]."""
    found = {}
    for held in held_by(config, 1, pads=False):
        names = [piece.tensor for piece in held.pieces]
        zeros = sum(piece.below for piece in held.pieces)
        tensors = {name: tensor if tensor.dim() else tensor.view(1) for name, tensor in tensors.items()}
        parts = [tensors[piece.tensor][piece.start : piece.stop].reshape(-1) for piece in held.pieces]
        whole = torch.cat([*parts, parts[0].new_zeros(zeros * tensors[names[0]].shape[-1])])
        narrow = whole.bfloat16() if whole.dtype == torch.float32 else whole  # a bias that is sent wide
        found[held.name] = whole.float() if held.wide else narrow
        if scale_name(names[0]) in tensors:
            engine_name = scale_name(held.name)
            scales = [(tensors[scale_name(piece.tensor)], piece) for piece in held.pieces]
            found[engine_name] = torch.cat(
                [each[piece.start // BLOCK : blocks(piece.stop)].reshape(-1) for each, piece in scales]
            )
    return found


@pytest.mark.slow
@pytest.mark.host_only  # on devices its FP8 models are what servers run
@pytest.mark.needs("SGLang")
def test_sglang_builds_and_fills_its_fp8_models_with_what_is_sent(tmp_path: Path) -> None:
    """Every family, by the flags of a server: each of its parameters is set, and to the bits that were sent.

    But for the scales of the families that are refused, every one of which SGLang drops.
    """
    folders = {family: wide(tmp_path / family, family) for family in FAMILIES}
    cases = []
    for family, folder in folders.items():
        save_file(sent(folder), tmp_path / f"{family}.sent")
        flags = ServerSpec(folder, "bfloat16", quantized=True, kv_tokens=1024).flags("127.0.0.1", 30000)
        cases.append((flags, tmp_path / f"{family}.sent", tmp_path / f"{family}.held"))
    loaded_by_sglang(cases)
    for family, folder in folders.items():
        held = load_file(tmp_path / f"{family}.held")
        expected = as_held(load_model_config(folder), sent(folder))
        assert held.keys() == expected.keys(), family
        wrong = [
            name
            for name, tensor in held.items()
            if tensor.dtype != expected[name].dtype
            or not torch.equal(tensor.reshape(-1).view(torch.uint8), expected[name].contiguous().view(torch.uint8))
        ]
        scales = [name for name in held if name.endswith("scale_inv")]
        assert sorted(wrong) == (sorted(scales) if family in UNSCALED_FAMILIES else []), family
        assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in held.values()) >= 8


@pytest.mark.parametrize("family", FAMILIES)
def test_linears_of_layers_are_quantised_and_nothing_else(family: str, tmp_path: Path) -> None:
    config = load_model_config(write_tiny_model(tmp_path / "model", family))
    left = set(expected_tensors(config)) - set(quantised(config))
    gates = (".gate.weight", "_gate.weight", ".gate.wg.weight")
    ends = (
        "norm.weight",
        "alpha_p",
        "alpha_n",
        ".beta",
        ".eps",
        "embed_tokens.weight",
        "lm_head.weight",
        ".bias",
        *gates,
        "correction_bias",
    )
    assert [name for name in left if not name.endswith(ends)] == []
    assert [name for name in quantised(config) if name.endswith(ends)] == []
    shapes = expected_tensors(config)
    assert all(
        scale == (-(-shapes[name][0] // 128), -(-shapes[name][1] // 128)) for name, scale in quantised(config).items()
    )


def test_published_fp8_models_have_scales_of_the_same_weights() -> None:
    """Names from the index of DeepSeek-V3's files, of a dense and of a sparse layer."""
    config = read_model(FOLDER / "deepseek-ai/DeepSeek-V3")
    attention = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    mlp = ("gate_proj", "up_proj", "down_proj")
    dense = {*(f"self_attn.{name}" for name in attention), *(f"mlp.{name}" for name in mlp)}
    experts = {f"mlp.experts.{number}.{name}" for number in range(256) for name in mlp}
    sparse = {*(f"self_attn.{name}" for name in attention), *experts, *(f"mlp.shared_experts.{name}" for name in mlp)}
    for layer, expected in ((0, dense), (3, sparse)):
        prefix = f"model.layers.{layer}."
        found = {name.removeprefix(prefix) for name in quantised(config) if name.startswith(prefix)}
        assert found == {f"{name}.weight" for name in expected}


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_can_be_served_in_fp8(name: str) -> None:
    config = read_model(FOLDER / name)
    if config.family in (*UNSCALED_FAMILIES, *REFUSED):
        with pytest.raises(UserError, match=f"the family {config.family}"):
            check_servable(config, 1)
    elif config.hidden_size % 128 or config.ffn_hidden_size % 128:
        with pytest.raises(UserError, match="has to be whole blocks"):
            check_servable(config, 1)
    else:
        check_servable(config, 1)


def test_a_rank_that_would_hold_a_part_of_a_block_is_refused(tmp_path: Path) -> None:
    config = load_model_config(write_wide(tmp_path / "model", "qwen3"))
    check_servable(config, 1)
    with pytest.raises(
        UserError, match=r"k_proj.weight of 128 x 256 cannot be held in blocks of 128 x 128 .* rollout.tp 2"
    ):
        check_servable(config, 2)
    config = load_model_config(write_wide(tmp_path / "heads", "qwen3", num_key_value_heads=4, num_attention_heads=8))
    check_servable(config, 2)
    with pytest.raises(UserError, match=r"`rollout\.quantization`"):
        check_servable(config, 4)
