"""Run by `alone.py`: scales of a KV cache that nobody sends are 1 after an update, whatever their memory held."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from megarl.models.fp8_weights import quantization_settings
from megarl.serving.sglang_kv_scales import LOADER, SCALES


def main() -> None:
    """Raises AssertionError where a scale is another, or where SGLang by itself would not take what it finds."""
    fp8: Any = importlib.import_module("sglang.srt.layers.quantization.fp8")
    attention: Any = importlib.import_module("sglang.srt.layers.radix_attention")
    loader: Any = importlib.import_module("sglang.srt.model_loader.loader")
    utils: Any = importlib.import_module("sglang.srt.utils")
    [settings] = quantization_settings().values()
    layer = attention.RadixAttention(2, 8, 1.0, 2, 0, quant_config=fp8.Fp8Config.from_config(settings), prefix="attn")
    model = torch.nn.Sequential(layer, torch.nn.Linear(2, 2))
    weight = model[1].weight.detach().clone()

    def updated(*calls: Any) -> list[float]:
        """What attention computes with after an update that found such memory."""
        for name in SCALES:
            getattr(layer, name).data.fill_(3.0)
        for call in calls:
            call(model, [])
        loader.DefaultModelLoader.postprocess_weights(model, torch.device("cpu"))
        return [value for name in SCALES for value in (getattr(layer, name).item(), getattr(layer, f"{name}_float"))]

    assert updated() == [3.0] * 4
    assert updated(utils.dynamic_import(LOADER)) == [1.0] * 4
    assert torch.equal(model[1].weight, weight)
