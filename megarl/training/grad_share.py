"""Whether one parameter holds nearly all of a gradient: clipping then leaves nothing for the others, and nothing else is learned.

Each rank adds up the squares of what its optimizer holds, parameter by parameter; one small sum an update brings them together.
Import only after `models.bootstrap.prepare_megatron`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from megarl.core.layout import Place
from megarl.models.all_gather import all_gather_objects
from megarl.models.hf_weights import HEAD_NAME
from megarl.training.spec import NEARLY_ALL

# Rows of these are tokens of the vocabulary, which tensor parallel cuts in order.
BY_TOKEN = ("word_embeddings.weight", "output_layer.weight")
PIECE = 1 << 20  # elements of a norm: on CPUs torch's float32 loses more with each element, 1% of 100 million


@dataclass(frozen=True)
class _Part:
    """What this rank's optimizer holds of a parameter. first: place of its first element in the rank's own part."""

    name: str
    model: Tensor
    first: int


class GradShares:
    """Watches the optimizer of one role. Every rank of the pool makes the same calls."""

    def __init__(self, optimizer: Any, parameters: Mapping[str, Tensor], place: Place, *, scores: bool = False) -> None:
        """parameters: this rank's own, by their names in the whole model. place: this rank's. Collective.

        scores: whether the model's head is one number, in the vocabulary's place.
        """
        # A pipeline stage without experts has an optimizer of experts that holds nothing.
        self._members = [each for each in optimizer.chained_optimizers if not getattr(each, "is_stub_optimizer", False)]
        self._parts = _parts(self._members, {id(tensor): name for name, tensor in parameters.items()})
        held = all_gather_objects(sorted({part.name for part in self._parts.values()}))
        self._index = {name: index for index, name in enumerate(sorted({name for names in held for name in names}))}
        # One that begins at zero has all of the first gradient, and nothing is wrong with that.
        self._head = self._index.get(HEAD_NAME) if scores else None
        self._device = next(iter(parameters.values())).device
        self._place = place
        self._squares: list[Tensor] = []  # of each optimizer step since the last report, [parameters] float64
        self._norms: list[float] = []
        self._rows: dict[str, tuple[float, int]] = {}  # by name: the largest element of this rank's part, and its row
        self._notes: list[str] = []
        self._told = False

    def add(self, grad_norm: float) -> None:
        """Look at the gradients of one optimizer step, before they are clipped. grad_norm: over all ranks."""
        held = list(self._held())
        squares = torch.zeros(len(self._index), dtype=torch.float64, device=self._device)
        if held:
            own = _squares([gradient for _, gradient in held])
            index = torch.tensor([self._index[part.name] for part, _ in held], device=self._device)
            squares.index_add_(0, index, own)
            largest = int(own.argmax())
            # This rank alone cannot know that a parameter holds nearly all; only then is its row worth a look.
            if not self._told and float(own[largest]) > grad_norm**2 / 2:
                self._look_at_rows(*held[largest])
        self._squares.append(squares)
        self._norms.append(grad_norm)

    def report(self) -> float:
        """The largest share that one parameter had of a squared norm since the last report, the same on every rank."""
        squares = torch.stack(self._squares)
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        whole = torch.tensor(self._norms, dtype=torch.float64, device=self._device).square()[:, None]
        shares = (squares / whole.clamp_min(torch.finfo(torch.float64).tiny)).amax(0)
        largest = float(shares.max())
        if self._head is not None:
            shares[self._head] = 0
        share, index = (float(each) for each in shares.max(0))
        if share > NEARLY_ALL and len(self._index) > 1 and not self._told:
            self._told = True
            self._notes.append(self._note(list(self._index)[int(index)], share))
        self._squares, self._norms, self._rows = [], [], {}
        return min(largest, 1.0)

    def take_notes(self) -> list[str]:
        """What a user should read of it: each once a run."""
        notes, self._notes = self._notes, []
        return notes

    def _held(self) -> Iterator[tuple[_Part, Tensor]]:
        """What counts for the norm on this rank, as Megatron counts it: nothing twice."""
        for member in self._members:
            for parameter in member.get_parameters():
                counts = param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(
                    parameter, getattr(member, "tp_group", None)
                )
                if counts and parameter.grad is not None and self._is_first(part := self._parts[id(parameter)], member):
                    yield part, parameter.grad

    def _is_first(self, part: _Part, member: Any) -> bool:
        """Whether no rank before this one holds the same gradient: only distributed optimizers cut it over data parallel."""
        if isinstance(member, DistributedOptimizer):
            return True
        is_expert = not getattr(part.model, "allreduce", True)
        return self._place.edp == 0 if is_expert else self._place.dp == self._place.cp == 0

    def _look_at_rows(self, part: _Part, gradient: Tensor) -> None:
        if part.name.endswith(BY_TOKEN):
            rows, width = part.model.shape
            size, place = gradient.abs().flatten().max(0)
            row = self._place.tp * rows + (part.first + int(place)) // width
            self._rows[part.name] = max(self._rows.get(part.name, (0.0, 0)), (float(size), row))

    def _note(self, name: str, share: float) -> str:
        rows = [rows[name] for rows in all_gather_objects(self._rows) if name in rows]
        row = f" (most of it in row {max(rows)[1]})" if rows else ""
        return (
            f"{name}{row} holds {min(100 * share, 99.99):.2f}% of the squared gradient norm of an optimizer step, and clipping "
            "leaves next to nothing for all others. An embedding that is zero does this (of a padding token that config.json "
            "does not name as pad_token_id), and so does a layer that is badly initialised."
        )


def _squares(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each: float64."""
    pieces = [gradient.flatten().split(PIECE) for gradient in gradients]
    norms = torch.stack(torch._foreach_norm([piece for cut in pieces for piece in cut])).double()
    numbers = [number for number, cut in enumerate(pieces) for _ in cut]
    sums = torch.zeros(len(gradients), dtype=torch.float64, device=norms.device)
    return sums.index_add_(0, torch.tensor(numbers, device=norms.device), norms.square())


def _parts(members: Sequence[Any], names: Mapping[int, str]) -> dict[int, _Part]:
    """By the identity of what an optimizer works on: parameters, copies of them, or pieces of either."""
    found: dict[int, _Part] = {}
    for member in members:
        if isinstance(member, DistributedOptimizer):
            models = _flat(member.model_float16_groups) + _flat(member.model_fp32_groups)
            mains = _flat(member.shard_fp32_from_float16_groups) + _flat(member.shard_fp32_groups)
            for model, main in zip(models, mains, strict=True):
                first = member._get_model_param_range_map(model)["param"].start
                found[id(main)] = _Part(names[id(model)], model, first)
            continue
        copies = zip(
            _flat(getattr(member, "float16_groups", [])),
            _flat(getattr(member, "fp32_from_float16_groups", [])),
            strict=True,
        )
        own = ((parameter, parameter) for parameter in member.get_parameters() if id(parameter) in names)
        found |= {id(main): _Part(names[id(model)], model, 0) for model, main in (*copies, *own)}
    return found


def _flat(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [each for group in groups for each in group]
