"""Megarl's models against transformers', on random checkpoints that transformers wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.core.platform import get_platform
from megarl.models.gpt import build_gpt, packed_params, transformer_config
from megarl.models.hf_config import load_model_config
from megarl.models.hf_weights import load_hf_weights
from tests.models.parity import LENGTHS, megatron_logits, packed_tokens, transformers_logprobs
from tests.support.tiny import write_tiny_qwen

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = get_platform("cpu")
CASES = [
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 32, "num_key_value_heads": 1}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 2.5}}),
]


def loaded(folder: Path) -> torch.nn.Module:
    config = load_model_config(folder)
    model = build_gpt(config, tp=1, dtype=torch.float32, platform=CPU).eval()
    load_hf_weights(model, config, folder, 0, 1)
    return model


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_packed_logprobs_equal_transformers(family: str, overrides: dict[str, object], tmp_path: Path) -> None:
    write_tiny_qwen(tmp_path, family, tokenizer=True, **overrides)
    ours = megatron_logits(loaded(tmp_path), 128).log_softmax(-1)
    assert (ours - transformers_logprobs(tmp_path, 128)).abs().max().item() < 1e-5


def test_packed_sequences_know_nothing_of_each_other(tmp_path: Path) -> None:
    model = loaded(write_tiny_qwen(tmp_path))
    tokens, positions, bounds = packed_tokens(128)
    with torch.no_grad():
        packed = model(tokens[None], positions[None], None, packed_seq_params=packed_params(bounds))[0]
        for start, length in zip(bounds.tolist(), LENGTHS, strict=False):
            part = tokens[start : start + length]
            alone = model(part[None], torch.arange(length)[None], None)[0]
            torch.testing.assert_close(packed[start : start + length], alone, atol=1e-5, rtol=1e-5)


def test_the_longest_sequence_and_not_the_pack_bounds_positions() -> None:
    params = packed_params(torch.tensor([0, 3, 10, 12], dtype=torch.int32))
    assert (params.max_seqlen_q, params.max_seqlen_kv, params.qkv_format) == (7, 7, "thd")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_have_the_dtype_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    config = load_model_config(write_tiny_qwen(tmp_path))
    model = build_gpt(config, tp=1, dtype=dtype, platform=CPU)
    load_hf_weights(model, config, tmp_path, 0, 1)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_the_loss_is_not_rescaled_and_nothing_is_dropped(tmp_path: Path) -> None:
    settings = transformer_config(
        load_model_config(write_tiny_qwen(tmp_path)), tp=1, dtype=torch.bfloat16, platform=CPU
    )
    assert settings.calculate_per_token_loss
    assert settings.attention_softmax_in_fp32
    assert settings.attention_dropout == settings.hidden_dropout == 0.0
    assert settings.bf16
