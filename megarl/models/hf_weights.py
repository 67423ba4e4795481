"""Weights between HF folders and a Megatron model of any layout: each rank reads only its part, and knows what it exports."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from megarl.core.errors import MegarlError, UserError
from megarl.core.layout import Layout, place
from megarl.models.config import ModelConfig
from megarl.models.hf_files import check_weights
from megarl.models.hf_read import HfReader
from megarl.models.mapping import within
from megarl.models.parts import Dealing, Part, part_of
from megarl.models.rule_table import FUSED
from megarl.models.rules import TOWER, LayerSpec, Rule, expected_tensors, rules
from megarl.models.weight_files import some

Bucket = list[tuple[str, Tensor]]
Value = Callable[[str, Tensor], Tensor]

HEAD_NAME = "output_layer.weight"
BUFFERS = ("mlp.router.expert_bias", "mlp.activation_func.beta", "mlp.activation_func.eps")
LAYER_NUMBER = re.compile(r"(?<=^decoder\.layers\.)\d+")
# Of experts one by one; and of all in one linear, of weights or of LoRA's factors.
EXPERT_NUMBER = re.compile(r"(?<=\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.(?:weight|lora_[ab]))\d+$")


def layer_spec(chunks: Sequence[Module]) -> LayerSpec:
    """Which layer spec a model was built with: it decides on the names of norms and experts."""
    names = chain.from_iterable(chunk.named_parameters() for chunk in chunks)
    return "transformer_engine" if any(name.endswith(".layer_norm_weight") for name, _ in names) else "torch"


def global_tensors(chunks: Sequence[Module], layout: Layout, rank: int) -> dict[str, Tensor]:
    """This rank's parameters and mapped buffers, its own parts, by their names in the whole model.

    chunks: one GPTModel for each virtual stage. Layers and experts count over the whole model, not within the rank.
    """
    found: dict[str, Tensor] = {}
    for chunk in chunks:
        gpt: Any = chunk
        layers = [layer.layer_number - 1 for layer in gpt.decoder.layers]
        first_expert = place(rank, layout).ep * ((gpt.config.num_moe_experts or 0) // layout.ep)
        buffers = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(BUFFERS))
        for name, tensor in chain(chunk.named_parameters(), buffers):
            found[_global_name(name, layers, first_expert)] = tensor
    return found


def _global_name(name: str, layers: Sequence[int], first_expert: int) -> str:
    name = LAYER_NUMBER.sub(lambda match: str(layers[int(match[0])]), name)
    return EXPERT_NUMBER.sub(lambda match: str(first_expert + int(match[0])), name)


@contextmanager
def exact_buffers(chunks: Sequence[Module]) -> Iterator[None]:
    """Casts of the model within the block leave the mapped buffers (float32), and a tower's, as they were, bit for bit."""
    kept = [
        (chunk, name, buffer)
        for chunk in chunks
        for name, buffer in chunk.named_buffers()
        if name.endswith(BUFFERS) or name.startswith(TOWER)
    ]
    yield
    for chunk, name, buffer in kept:
        chunk.get_buffer(name).data = buffer.data


def hold_in_float32(chunks: Sequence[Module], wide: Collection[str], layout: Layout, rank: int) -> None:
    """Give these parameters, by their global names, new memory in float32; what is in it is not set."""
    for name, tensor in global_tensors(chunks, layout, rank).items():
        if name in wide:
            tensor.data = torch.empty_like(tensor, dtype=torch.float32)


def load_hf_weights(
    chunks: Sequence[Module],
    config: ModelConfig,
    folder: Path,
    layout: Layout,
    rank: int,
    *,
    check_finite: bool = True,
    stored: ModelConfig | None = None,
) -> None:
    """Fill every parameter and mapped buffer of this rank, cast to the parameter's dtype; only its slices are read.

    stored: what the folder holds, where its head is another than the model's: that head is then left as it was built.
    check_finite: look for NaN and infinite values (a tenth of the time, when the files are in the page cache).
    Raises UserError for tensors that are missing, too many, of another shape or not finite, and MegarlError for
    parameters and rules that do not meet.
    """
    stored = stored or config
    index = check_weights(expected_tensors(stored), folder, stored)
    with HfReader(index, check_finite=check_finite) as reader, torch.no_grad():
        for rule, part, tensor in by_rule(chunks, config, layout, rank):
            if stored.head == config.head or rule.megatron != HEAD_NAME:
                _fill(tensor, rule, part, reader)
        if not_finite := reader.finish():
            raise UserError(
                f"Weights in {folder} are NaN or infinite: {some(not_finite)}. "
                "The model diverged before it was saved, or the files are damaged: take an earlier checkpoint."
            )


def by_rule(
    chunks: Sequence[Module], config: ModelConfig, layout: Layout, rank: int
) -> Iterator[tuple[Rule, Part, Tensor]]:
    """Every rule of which this rank holds a part, with the part and the tensor that holds it.

    Raises MegarlError where rules and tensors do not meet: one is missing, too many, or of another shape.
    """
    where, dealing, held = place(rank, layout), Dealing(config, layout), global_tensors(chunks, layout, rank)
    for rule in rules(config, layer_spec(chunks), has_head_copy=layout.pp > 1):
        if dealing.is_held(rule, where):
            part = dealing.part(rule, where)
            yield rule, part, _matching(held.pop(rule.megatron, None), rule, part)
    if held:
        raise MegarlError(f"No rule fills the parameters {sorted(held)} of family {config.family}.")


def _matching(tensor: Tensor | None, rule: Rule, part: Part) -> Tensor:
    if tensor is None or tensor.shape != part.shape:
        found = "is not there" if tensor is None else f"has shape {list(tensor.shape)}"
        raise MegarlError(f"The model's parameter {rule.megatron} {found}; its rule gives {list(part.shape)}.")
    if rule.is_buffer:
        # Casting a model casts its buffers too, and this one has to stay exact.
        tensor.data = tensor.data.float()
    return tensor


def _fill(tensor: Tensor, rule: Rule, part: Part, reader: HfReader) -> None:
    for run in part.runs:
        source, rows = rule.sources[run.source], tensor[run.at : run.at + run.stop - run.start]
        if not source.is_turned:
            of_all = slice(source.first_row + run.start, source.first_row + run.stop)
            reader.read(source.name, of_all, part.columns, rows)
        else:
            # No layout cuts such an expert.
            assert source.slot is not None and rows.shape == source.shape, (rule.megatron, part)
            reader.read_slot(source.name, source.slot, rows)
    if part.padding:
        tensor[-part.padding :] = 0


@dataclass(frozen=True)
class Share:
    """What one rank gives of an HF tensor: of a rule's source the rows, and columns, of its part. count: parts of the rule."""

    rule: Rule
    source: int
    part: Part
    count: int

    def of(self, whole: Tensor) -> Tensor:
        """The source within the HF tensor: a view."""
        return within(whole, self.rule.sources[self.source])


@dataclass(frozen=True)
class Unit:
    """One HF tensor of an export: source `source` of a rule. others: more (rule, source) with slots in the same tensor."""

    rule: Rule
    source: int
    others: tuple[tuple[Rule, int], ...] = ()

    @property
    def name(self) -> str:
        """HF's name."""
        return self.rule.sources[self.source].name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.rule.sources[self.source].stored

    @property
    def is_stacked(self) -> bool:
        """Whether rules have slots in it."""
        return self.rule.sources[self.source].slot is not None

    def holders(self, dealing: Dealing) -> list[int]:
        """The rank of each share in the first copy of the model."""
        return [rank for rule, _ in ((self.rule, self.source), *self.others) for rank in dealing.holders(rule)]

    def shares(self, count: int) -> Iterator[Share]:
        """All that make it up, so many, in the order of `holders`."""
        each, rest = divmod(count, 1 + len(self.others))
        assert rest == 0, (self.name, count)
        for rule, source in ((self.rule, self.source), *self.others):
            yield from (Share(rule, source, part_of(rule, index, each), each) for index in range(each))

    def dtype(self, of_parameters: torch.dtype) -> torch.dtype:
        """Mapped buffers are float32 always."""
        return torch.float32 if self.rule.is_buffer else of_parameters

    def nbytes(self, of_parameters: torch.dtype) -> int:
        """Of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype(of_parameters).itemsize


def units_of(exported: Iterable[Rule]) -> list[Unit]:
    """All HF tensors of these rules, in their order: those of a rule follow each other. A layer's experts may share some."""
    members: dict[str, list[tuple[Rule, int]]] = {}
    for rule in exported:
        for source, each in enumerate(rule.sources):
            members.setdefault(each.name, []).append((rule, source))
    return [Unit(*first, tuple(others)) for first, *others in members.values()]


def planned(
    units: Sequence[Unit], dtype: torch.dtype, bucket_bytes: int, first_bytes: int | None = None
) -> Iterator[list[Unit]]:
    """Buckets, as every rank plans them without asking the others. dtype: of the parameters. first_bytes: of the first one."""
    bucket: list[Unit] = []
    size, limit = 0, bucket_bytes if first_bytes is None else first_bytes
    for together in _inseparable(units):
        nbytes = sum(unit.nbytes(dtype) for unit in together)
        if bucket and size + nbytes > limit:
            yield bucket
            bucket, size, limit = [], 0, bucket_bytes
        bucket += together
        size += nbytes
    if bucket:
        yield bucket


def _inseparable(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """The units one by one, but for those that have to share a bucket (FUSED), which follow each other."""
    held: list[Unit] = []
    for unit in units:
        if held and not (unit.rule.megatron.endswith(FUSED) and unit.rule.layer == held[0].rule.layer):
            yield held
            held = []
        if unit.rule.megatron.endswith(FUSED):
            held.append(unit)
        else:
            yield [unit]
    if held:
        yield held


class Held:
    """What one rank exports of its own parameters and mapped buffers: `value` of each where there is one."""

    def __init__(self, chunks: Sequence[Module], layout: Layout, rank: int, value: Value | None) -> None:
        self._tensors, self._value = global_tensors(chunks, layout, rank), value
        self._last: tuple[str, Tensor] | None = None
        name, first = next(iter(self._tensors.items()))
        self.dtype, self.device = (first if value is None else value(name, first)).dtype, first.device

    def value(self, rule: Rule, part: Part) -> Tensor:
        """What this rank exports of a rule, of the part's shape; made once for all of its HF tensors, which follow each other."""
        if self._last is None or self._last[0] != rule.megatron:
            # The parameter itself, not a detached view: what `value` looks for, such as a gradient, hangs on it.
            parameter = _matching(self._tensors.get(rule.megatron), rule, part)
            tensor = parameter if self._value is None else self._value(rule.megatron, parameter)
            dtype = torch.float32 if rule.is_buffer else self.dtype
            if tensor.shape != parameter.shape or tensor.dtype != dtype:
                raise MegarlError(
                    f"The value to export for {rule.megatron} is {list(tensor.shape)} {tensor.dtype}; every rank "
                    f"expects {list(parameter.shape)} {dtype}."
                )
            self._last = rule.megatron, tensor.detach()
        return self._last[1]
