"""LoRA on transformers' experts, by hand: every expert's W + alpha / rank * B A, out of what PEFT's files hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

# An expert's linear in PEFT's files, where it has a module of its own.
ALONE = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(gate_proj|w1)\.lora_A\.weight$")
# All of a layer's experts in one.
TOGETHER = re.compile(r"(?P<module>.*(\.experts(\.base_layer)?|put_linear))\.lora_A\.weight$")


def add_to_experts(model: Any, factors: Mapping[str, Tensor], scale: float) -> None:
    """Have the model compute with adapted experts; gradients reach the factors. They are by their names in PEFT's files."""
    for name in factors:
        if found := ALONE.fullmatch(name):
            own = [factor for factor in factors if factor.startswith(f"{found['experts']}.")]
            _adapt_apart(model, found["experts"], {factor: factors[factor] for factor in own}, scale)
        elif found := TOGETHER.fullmatch(name):
            module = found["module"]
            _adapt_together(model, module, factors[name], factors[f"{module}.lora_B.weight"], scale)


def _adapt_apart(model: Any, prefix: str, factors: Mapping[str, Tensor], scale: float) -> None:
    experts = model.get_submodule(prefix.replace("block_sparse_moe", "mlp"))
    if parametrize.is_parametrized(experts):
        return
    count = experts.gate_up_proj.shape[0]

    def deltas(*names: str) -> Tensor:
        both = [[factors[f"{prefix}.{e}.{name}.lora_{f}.weight"] for name in names for f in "BA"] for e in range(count)]
        return torch.stack([torch.cat([b @ a for b, a in zip(each[::2], each[1::2], strict=True)]) for each in both])

    gate, up, down = ("gate_proj", "up_proj", "down_proj") if "mlp" in prefix else ("w1", "w3", "w2")
    _add(experts, "down_proj", lambda: scale * deltas(down))
    _add(experts, "gate_up_proj", lambda: scale * deltas(gate, up))


def _adapt_together(model: Any, path: str, lora_a: Tensor, lora_b: Tensor, scale: float) -> None:
    """As peft 0.21 puts them together (tuners/lora/layer.py, ParamWrapper.get_delta_weight)."""
    module = model.get_submodule(path.removesuffix(".base_layer"))
    name = "weight" if hasattr(module, "weight") else "gate_up_proj" if path.endswith("base_layer") else "down_proj"
    count, is_turned = getattr(module, name).shape[0], getattr(module, "is_transposed", False)

    def delta() -> Tensor:
        a, b = lora_a.reshape(count, -1, lora_a.shape[1]), lora_b.reshape(lora_b.shape[0], -1, count)
        return scale * torch.einsum(f"ore,eri->{'eio' if is_turned else 'eoi'}", b, a)

    _add(module, name, delta)


def _add(module: nn.Module, name: str, delta: Callable[[], Tensor]) -> None:
    class Sum(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight + delta()

    parametrize.register_parametrization(module, name, Sum())
