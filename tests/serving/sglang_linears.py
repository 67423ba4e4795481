"""Linear layers with their copy for oneDNN: the numbers of the plain weights, as of the last load that has ended.

For a process that has loaded SGLang (alone.py).
"""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch.nn.functional import linear

from megarl.serving import sglang_cpu_linear


class Layer(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(24, 40).to(dtype), requires_grad=False)
        self.quant_method = UnquantizedLinearMethod()


def close(layer, weight, rows, bias=None):
    x = torch.randn(*rows, 40).to(weight.dtype)
    atol = 1e-5 if weight.dtype == torch.float32 else 5e-2
    torch.testing.assert_close(layer.quant_method.apply(layer, x, bias), linear(x, weight, bias), rtol=2e-2, atol=atol)


def check_loads(dtype):
    layer = Layer(dtype)
    model = torch.nn.Sequential(layer, torch.nn.Linear(2, 2))
    assert sglang_cpu_linear.pack(model) == 1, "packed"
    for rows in ((1,), (7,), (64,), (3, 5), (0,)):
        close(layer, layer.weight, rows)
        close(layer, layer.weight, rows, torch.randn(24).to(dtype))
    old = layer.weight.clone()
    layer.weight.data.copy_(torch.randn(24, 40))
    close(layer, old, (9,))  # nothing said that the weights changed
    with pytest.raises(AssertionError):
        close(layer, layer.weight, (9,))
    layer.quant_method.restore_weights_before_loading(layer)
    close(layer, layer.weight, (9,))
    layer.weight.data.copy_(torch.randn(24, 40))
    close(layer, layer.weight, (9,))  # within a session
    layer.quant_method.process_weights_after_loading(layer)
    close(layer, layer.weight, (9,))
    assert layer.quant_method._packed is not None


def main():
    torch.manual_seed(0)
    check_loads(torch.float32)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        check_loads(torch.bfloat16)
    else:
        assert sglang_cpu_linear.pack(Layer(torch.bfloat16)) == 0, "no layout of bfloat16 on this CPU"
    layer = Layer(torch.float32)
    sglang_cpu_linear.MOST_BYTES = layer.weight.nbytes - 1
    assert sglang_cpu_linear.pack(layer) == 0, "too large"
    assert type(layer.quant_method) is UnquantizedLinearMethod
    half = Layer(torch.float16)
    sglang_cpu_linear.MOST_BYTES = 10**6
    assert sglang_cpu_linear.pack(half) == 0, "float16"
