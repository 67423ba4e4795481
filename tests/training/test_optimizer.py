"""What is said of parameters before Megatron makes an optimizer of them."""

from __future__ import annotations

import torch
from torch.nn import Module, ModuleDict, Parameter

from megarl.training.rank import Rank


class Linear(Module):
    """As Transformer Engine's: each weight is marked as a part of a tensor."""

    def __init__(self, parallel_mode: str | None) -> None:
        super().__init__()
        self.parallel_mode = parallel_mode
        self.weight = Parameter(torch.zeros(1))
        setattr(self.weight, "tensor_model_parallel", True)  # noqa: B010


def test_weights_that_every_rank_holds_whole_count_once(rank: Rank) -> None:
    """The down-projections of latent attention; experts are whole, too, but on other ranks others."""
    from megarl.training.optimizer import mark_copies

    layer = {"linear_kv_down_proj": Linear(None), "linear_proj": Linear("row"), "norm": torch.nn.RMSNorm(1)}
    experts = ModuleDict({"experts": ModuleDict({"linear_fc1": Linear(None)}), "shared_experts": Linear("column")})
    mark_copies(ModuleDict({"self_attention": ModuleDict(layer), "mlp": experts}))
    marks = [getattr(each.weight, "tensor_model_parallel", None) for each in layer.values()]
    assert marks == [False, True, None]
    assert experts["experts"]["linear_fc1"].weight.tensor_model_parallel
    assert experts["shared_experts"].weight.tensor_model_parallel  # type: ignore[union-attr]
