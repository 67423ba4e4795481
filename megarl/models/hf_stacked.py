"""Experts that lie in one tensor a layer, of which each one's are rows: folders of one family have them so, or one by one.

Qwen3.5's are published in one tensor for all gates and ups and one for all downs; transformers' `save_pretrained` writes a
tensor for each expert's gate, up and down. megarl writes and sends these, of which none is large. Qwen3-VL's are published with
rows and columns of each exchanged, which is the only form that transformers and SGLang both load, and so megarl writes that
(`Stacks`), an expert at a time. Without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

STACKED_FAMILIES = ("qwen3_5_moe",)
_ONE = re.compile(r"(.+\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight")
_ALL = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


def stacked(names: Iterable[str]) -> dict[str, list[str]]:
    """Name of a tensor of all experts -> names of those whose rows it has, one below the other, as they come in `names`."""
    found: dict[str, list[str]] = {}
    for name in names:
        if match := _ONE.fullmatch(name):
            found.setdefault(f"{match[1]}.{_ALL[match[2]]}", []).append(name)
    return found


@dataclass(frozen=True)
class Stack:
    """A tensor of all experts. each: of how many parts every expert's matrix is, each of them [rows, width]."""

    name: str
    experts: int
    each: int
    rows: int
    width: int

    @property
    def exchanged(self) -> bool:
        """Whether rows and columns are: transformers takes a matrix for one as it computes with it where both would fit."""
        return self.each * self.rows != self.width

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the tensor."""
        own = (self.each * self.rows, self.width)
        return (self.experts, *(reversed(own) if self.exchanged else own))

    @property
    def elements(self) -> int:
        """Of one expert's matrix."""
        return self.each * self.rows * self.width


class Stacks:
    """Where the tensors of single experts go."""

    def __init__(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """expected: name -> shape, of tensors of each expert."""
        self._places: dict[str, tuple[Stack, int, int]] = {}
        self._of_layer: dict[str, list[Stack]] = {}
        for name, parts in stacked(expected).items():
            each = 2 if name.endswith(_ALL["gate"]) else 1
            stack = Stack(name, len(parts) // each, each, *expected[parts[0]])
            self._places |= {part: (stack, *divmod(number, each)) for number, part in enumerate(parts)}
            self._of_layer.setdefault(name.rpartition(".")[0], []).append(stack)

    def place(self, name: str) -> tuple[Stack, int, int] | None:
        """The stack of a tensor, the expert, and which of its parts; None of one that is of no expert."""
        return self._places.get(name)

    def stack(self, name: str) -> Stack | None:
        """The tensor of all experts that has this name."""
        return next((each for each in self._of_layer.get(name.rpartition(".")[0], ()) if each.name == name), None)

    def beside(self, stack: Stack) -> list[Stack]:
        """All stacks of its layer: their parts come by turns."""
        return self._of_layer[stack.name.rpartition(".")[0]]
