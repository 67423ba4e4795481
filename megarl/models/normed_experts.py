"""Experts beside the MLP of their layer, each side with norms of its own (Gemma 4)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megarl.models.norms import RMSNorm
from megarl.models.routers import Router


class NormedExperts(MoELayer):  # type: ignore[misc]
    """Megatron's layer of experts, whose shared ones are the layer's MLP; it is given hidden states that nobody has normed.

    out = norm(norm(MLP(norm(x))) + norm(experts(norm(x), router(x)))).
    """

    def __init__(self, *positions: Any, **options: Any) -> None:
        super().__init__(*positions, **options)
        for name in ("pre_shared", "post_shared", "pre_routed", "post_routed", "post"):
            norm = RMSNorm(self.config, self.config.hidden_size, self.config.layernorm_epsilon)
            setattr(self, f"{name}_layernorm", norm)

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
        """[s, b, hidden] -> the same."""
        output: Tensor = super().shared_experts_compute(self.pre_shared_layernorm(hidden_states))
        normed: Tensor = self.post_shared_layernorm(output)
        return normed

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """As Megatron has it: what is sent to experts, and by how much each counts."""
        sent: tuple[Tensor, Tensor] = super().preprocess(self.pre_routed_layernorm(hidden_states), probs, routing_map)
        return sent

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """What experts put out and what the MLP does, together: [s, b, hidden]."""
        assert shared_expert_output is not None
        routed = self.post_routed_layernorm(super().postprocess(output, None))
        normed: Tensor = self.post_layernorm(routed + shared_expert_output)
        return normed


class NormedRouter(Router):
    """Reads hidden states behind a norm without a weight, times numbers of its own; each expert's share is multiplied too."""

    def __init__(self, *positions: Any, **options: Any) -> None:
        super().__init__(*positions, **options)
        for name, size in (("input_scale", self.config.hidden_size), ("expert_scale", self.config.num_moe_experts)):
            scale = torch.nn.Parameter(self.weight.new_empty(size, dtype=self.config.params_dtype))
            # Megatron sums the gradients of such weights over the tensor-parallel ranks.
            setattr(scale, "sequence_parallel", self.config.sequence_parallel)  # noqa: B010
            setattr(self, name, scale)

    def gating(self, input: Tensor) -> Tensor:
        """[..., hidden] to logits, [..., experts]."""
        width = self.config.hidden_size
        normed = F.rms_norm(input, (width,), eps=self.config.layernorm_epsilon)
        return super().gating(normed * self.input_scale * width**-0.5)

    def routing(self, logits: Tensor, *positions: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """As Megatron has it: shares [T, experts], and which experts a token goes to."""
        shares, chosen = super().routing(logits, *positions, **options)
        return shares * self.expert_scale.to(shares.dtype), chosen
