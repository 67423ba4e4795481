"""Who knows how long packed sequences are, and who has to ask the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megarl.core.layout import Layout
from megarl.models.gpt import build_gpt
from megarl.models.hf_config import load_model_config
from megarl.models.hf_weights import load_hf_weights
from megarl.models.layer_spec import LatentSelfAttention
from megarl.models.packed import on_device, on_host, packed_params
from megarl.training.parallel import Groups
from tests.models.parity import packed_on
from tests.support.platforms import chosen
from tests.support.tiny import write_tiny_model

VOCAB = 128


def bounds(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def test_the_longest_sequence_and_not_the_pack_bounds_positions() -> None:
    params = packed_params(bounds(0, 3, 10, 12))
    assert (params.max_seqlen_q, params.max_seqlen_kv, params.qkv_format) == (7, 7, "thd")


def test_padded_bounds_are_given_where_context_parallel_cuts_them() -> None:
    """As one tensor with the others: Transformer Engine compares them in each layer, and torch then looks at no device."""
    given = bounds(0, 4, 8)
    assert packed_params(given).cu_seqlens_q_padded is None and packed_params(given).cu_seqlens_kv_padded is None
    both = packed_params(given, cp=2)
    assert both.cu_seqlens_q_padded is both.cu_seqlens_q is given
    assert both.cu_seqlens_kv_padded is both.cu_seqlens_kv is given


def test_where_the_host_knows_the_bounds_all_of_them_are_its() -> None:
    known = bounds(0, 4, 12)
    device = known.to("meta")
    for cp in (1, 2):
        params = packed_params(device, cp, known)
        host = on_host(params)
        assert (host.max_seqlen_q, host.qkv_format) == (8, "thd") and params.cu_seqlens_q is device
        assert host.cu_seqlens_q is host.cu_seqlens_kv is known
        assert host.cu_seqlens_q_padded is host.cu_seqlens_kv_padded is (known if cp > 1 else None)
        again = on_device(host)
        assert again.cu_seqlens_q is again.cu_seqlens_kv is device
        assert again.cu_seqlens_q_padded is again.cu_seqlens_kv_padded is (device if cp > 1 else None)
        assert on_device(params) is params
    unknown = packed_params(known)
    assert on_host(unknown) is unknown


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "deepseek_v3", "ministral3", "gemma3"])
def test_layers_of_torch_never_ask_the_device_for_bounds(family: str, one_rank: Groups, tmp_path: Path) -> None:
    """On the device meta there are no values to ask for. Megatron's rotation and our core would wait for them in each layer."""
    config = load_model_config(write_tiny_model(tmp_path, family))
    [model] = build_gpt(config, Layout(), one_rank.collection, dtype=torch.float32, platform=chosen())
    load_hf_weights([model], config, tmp_path, Layout(), 0)
    tokens, positions, ends = packed_on(model.eval(), VOCAB)

    def logits(**packed: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(tokens[None], positions[None], None, packed_seq_params=packed_params(**packed))
        return found

    known = {"cu_seqlens": ends.to("meta"), "host_bounds": ends.cpu()}
    assert torch.equal(logits(**known), logits(cu_seqlens=ends))


def test_latent_attention_of_transformer_engine_rotates_by_bounds_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(MLASelfAttention, "get_query_key_value_tensors", lambda *given, **_: seen.append(given[4]))
    attention, known = LatentSelfAttention.__new__(LatentSelfAttention), bounds(0, 4, 12)
    params = packed_params(known.to("meta"), host_bounds=known)
    attention.get_query_key_value_tensors(torch.zeros(12, 1, 8), None, None, params, inference_context=None)
    attention.get_query_key_value_tensors(torch.zeros(12, 1, 8))
    assert seen[0].cu_seqlens_q is known and seen[1] is None
