"""A head of one number a token in the place of the vocabulary: values of a critic, scores of a reward model."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ScalarHead(torch.nn.Module):
    """hidden -> 1 without bias, whole on every tensor-parallel rank; stands where GPTModel has its output layer.

    Weights are zero until a checkpoint fills them: a new critic says 0 everywhere, at every layout.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self._sequence_parallel, self._tp = config.sequence_parallel, groups.tp
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        # Each rank sees a part of the tokens: Megatron sums the gradients of such weights over tensor parallel.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """hidden: [s, b, hidden] -> [s, b, 1] float32; s is the whole length behind sequence parallel."""
        output = torch.nn.functional.linear(hidden, self.weight).float()
        if self._sequence_parallel:
            # The loss is computed on every rank: each takes its part of the gradient, none is summed.
            output = gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False, group=self._tp)
        return output, None
