"""An Adam that keeps its books as the fused ones of Transformer Engine and Apex do."""

from __future__ import annotations

from typing import Any

import torch


class FakeFusedAdam(torch.optim.Optimizer):
    """Keeps what the fused Adams do where they do: no state before the first step, and the step's number in the group."""

    def __init__(
        self, params: Any, *, lr: float, weight_decay: float, betas: tuple[float, float], eps: float, adam_w_mode: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        assert adam_w_mode

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """As Adam with decoupled weight decay."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state, gradient, (first, second) = self.state[parameter], parameter.grad, group["betas"]
                average = state.setdefault("exp_avg", torch.zeros_like(parameter)).lerp_(gradient, 1 - first)
                square = state.setdefault("exp_avg_sq", torch.zeros_like(parameter)).lerp_(gradient**2, 1 - second)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                root = (square / (1 - second ** group["step"])).sqrt() + group["eps"]
                parameter -= group["lr"] * average / (1 - first ** group["step"]) / root
