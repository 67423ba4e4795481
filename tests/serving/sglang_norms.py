"""Norms and rotary positions in few operations: the numbers of SGLang's own torch code, and layers with options keep that.

For a process that has loaded SGLang (alone.py).
"""

from __future__ import annotations

import torch
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from torch.testing import assert_close

from megarl.serving.sglang_cpu_layers import shorten

TOLERANCES = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (2e-2, 2e-2)}


def same(found, wanted, dtype):
    assert_close(found, wanted, rtol=TOLERANCES[dtype][0], atol=TOLERANCES[dtype][1])
    assert [each.dtype for each in found] == [dtype] * len(found), "dtypes"


def check_norms(norm, dtype):
    x, residual, more = torch.randn(3, 7, 40).to(dtype)
    same([norm(x)], [norm.forward_native(x)], dtype)
    same(norm(x, residual), norm.forward_native(x, residual), dtype)
    same(norm(x, residual, more), norm.forward_native(x, residual, more), dtype)
    gaps = torch.randn(7, 80).to(dtype)[:, ::2]
    same([norm(gaps)], [norm.forward_native(gaps)], dtype)
    wide = x.float() if dtype is torch.bfloat16 else x.double()  # mixed: as SGLang has it
    assert torch.equal(norm(wide), norm.forward_native(wide)), "mixed"
    natively = norm.forward_native(x, residual.double())
    for mine, native in zip(norm(x, residual.double()), natively, strict=True):
        assert torch.equal(mine, native) and mine.dtype == native.dtype, "mixed residual"
    norm.weight.data.normal_()  # as by a sync
    same([norm(x)], [norm.forward_native(x)], dtype)


def check_rope(rope, begin, dtype):
    q, k = torch.randn(5, 3 * 8).to(dtype), torch.randn(5, 8).to(dtype)
    positions = torch.tensor([0, 1, 63, 7, 7])
    turned = rope(positions, q, k)
    same(turned, rope.forward_native(positions, q, k), dtype)
    same(rope(positions, k, q), rope.forward_native(positions, k, q), dtype)  # another layer of the same pass
    offsets = torch.tensor([1, 2, 0, 3, 4])
    same(rope(positions, q, k, offsets), rope.forward_native(positions, q, k, offsets), dtype)
    others = torch.tensor([9, 8, 7, 6, 5])
    same(rope(others, q, k), rope.forward_native(others, q, k), dtype)
    others += 20
    begin()
    same(rope(others, q, k), rope.forward_native(others, q, k), dtype)
    assert not torch.equal(turned[0], rope(others, q, k)[0])


def check_llama3():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 = get_rope(8, 8, 64, 10000, True, scaling | {"original_max_position_embeddings": 32}, torch.float32)
    shorten(llama3)
    positions = torch.tensor([0, 1, 63, 7, 7])
    q, k = torch.randn(2, 5, 16)
    same(llama3(positions, q, k), llama3.forward_native(positions, q, k), torch.float32)
    assert llama3._forward_method is not None


def check_options():
    left = [
        GemmaRMSNorm(40),
        RMSNorm(40, has_weight=False),
        RMSNorm(40, cast_x_before_out_mul=True),
        RMSNorm(40, var_hidden_size=20),
        RMSNorm(40, fp32_residual=True),
        RMSNorm(40, override_orig_dtype=torch.float32),
        RotaryEmbedding(8, 8, 64, 10000, False, torch.float32),
        RotaryEmbedding(8, 4, 64, 10000, True, torch.float32),
    ]
    shorten(torch.nn.ModuleList(left))
    assert all(layer._forward_method is None for layer in left), "options"


def main():
    torch.manual_seed(0)
    for dtype in TOLERANCES:
        norm = RMSNorm(40, eps=1e-5).to(dtype)
        norm.weight.data.normal_()
        rope = RotaryEmbedding(8, 8, 64, 10000, True, dtype)
        begin = shorten(torch.nn.ModuleList([norm, rope]))
        check_norms(norm, dtype)
        check_rope(rope, begin, dtype)
    check_llama3()
    check_options()
