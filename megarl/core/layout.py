"""Which part of the work belongs to which rank. Pure arithmetic: the driver asks it without torch or Megatron.

The order is Megatron's own (`tp-cp-ep-dp-pp`, tensor parallel fastest): neighbouring ranks share a tensor-parallel
group, so that its traffic stays inside a node. Experts have axes of their own over the same ranks: expert-tensor
fastest, then expert, then what is left, in each pipeline stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.core.errors import UserError


@dataclass(frozen=True)
class Layout:
    """How the ranks of one pool share a model; data parallel is what the other axes leave of the ranks.

    tp: tensor, pp: pipeline, cp: context, ep: expert, etp: expert-tensor parallel size. vpp: virtual stages of each
    pipeline rank (interleaved schedule). sequence_parallel: activations between tensor-parallel regions are cut too.
    first_stage_layers, last_stage_layers: where the first or last pipeline rank shall hold another number of layers.

    Raises UserError when the axes do not fit the number of ranks, or each other.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    sequence_parallel: bool = False
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    world_size: int = 1

    def __post_init__(self) -> None:
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep, "etp": self.etp, "vpp": self.vpp}
        wrong = [f"{name}={size}" for name, size in sizes.items() if size < 1]
        if wrong or self.world_size < 1:
            raise UserError(f"A layout needs sizes of at least 1; got {', '.join(wrong) or self.world_size} ranks.")
        for names in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
            self._check_product({name: sizes[name] for name in names})
        if self.pp == 1 and (self.vpp > 1 or self.first_stage_layers or self.last_stage_layers):
            raise UserError("Virtual stages, and stages of another size, need pipeline parallel: set pp to 2 or more.")
        if self.sequence_parallel and self.tp == 1:
            raise UserError("Sequence parallel cuts activations over the tensor-parallel ranks: set tp to 2 or more.")

    def _check_product(self, sizes: dict[str, int]) -> None:
        product = 1
        for size in sizes.values():
            product *= size
        if self.world_size % product:
            divisors = [size for size in range(1, self.world_size + 1) if self.world_size % size == 0]
            text = " x ".join(f"{name} {size}" for name, size in sizes.items())
            raise UserError(
                f"{text} = {product} does not divide {self.world_size} devices. "
                f"Choose sizes whose product is one of {divisors}, or change cluster.devices."
            )

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks, which is the number of shards of a batch."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Number of copies of each expert."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world_size // self.pp

    @property
    def sequence_multiple(self) -> int:
        """Each packed sequence is padded to a multiple of this: 2 chunks a context rank, cut over sequence parallel."""
        return (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.sequence_parallel else 1)

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "cp": self.cp, "ep": self.ep, "etp": self.etp}
        parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        parts += ["sp"] if self.sequence_parallel else []
        for name, layers in (("first", self.first_stage_layers), ("last", self.last_stage_layers)):
            parts += [f"{name}{layers}"] if layers else []
        parts += [f"dp{self.dp}"] if self.dp > 1 else []
        return " ".join(parts) or "one rank"


@dataclass(frozen=True)
class Place:
    """A rank's index on every axis of a layout."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


def place(rank: int, layout: Layout) -> Place:
    """Where a rank stands."""
    pp, inner = divmod(rank, layout.stage_size)
    return Place(
        tp=inner % layout.tp,
        cp=inner // layout.tp % layout.cp,
        dp=inner // (layout.tp * layout.cp),
        pp=pp,
        etp=inner % layout.etp,
        ep=inner // layout.etp % layout.ep,
        edp=inner // (layout.etp * layout.ep),
    )


def dense_rank(layout: Layout, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
    """The rank at this place of the dense axes."""
    return pp * layout.stage_size + (dp * layout.cp + cp) * layout.tp + tp


def expert_rank(layout: Layout, *, etp: int = 0, ep: int = 0, edp: int = 0, pp: int = 0) -> int:
    """The rank at this place of the expert axes."""
    return pp * layout.stage_size + (edp * layout.ep + ep) * layout.etp + etp


def dp_rank(rank: int, layout: Layout) -> int:
    """Index of the data-parallel shard that the rank works on."""
    return place(rank, layout).dp


def is_lead(rank: int, layout: Layout) -> bool:
    """Whether the rank answers for its shard: of the last stage, which has the logits, the first tensor and context rank."""
    where = place(rank, layout)
    return where.tp == 0 and where.cp == 0 and where.pp == layout.pp - 1


def stage_layers(layout: Layout, num_layers: int) -> tuple[tuple[range, ...], ...]:
    """Layers (from 0) of each virtual stage of each pipeline rank: [pp][vpp], as Megatron deals them.

    Raises UserError when the layers cannot be assigned evenly.
    """
    fixed = {0: layout.first_stage_layers, layout.pp - 1: layout.last_stage_layers}
    given = {stage: layers for stage, layers in fixed.items() if layers is not None}
    middle, rest = layout.pp - len(given), num_layers - sum(given.values())
    even = rest // middle if middle else 0
    counts = [given.get(stage, even) for stage in range(layout.pp)]
    if sum(counts) != num_layers or any(count < 1 or count % layout.vpp for count in counts):
        asked = f"{num_layers} layers cannot be assigned to {layout.pp} pipeline ranks of {layout.vpp} virtual stages"
        names = {0: "the first", layout.pp - 1: "the last"}
        uneven = (
            " with " + " and ".join(f"{count} on {names[stage]}" for stage, count in given.items()) if given else ""
        )
        raise UserError(
            f"{asked}{uneven}: every rank needs a number of layers that {layout.vpp} divides, and all together "
            f"{num_layers}. Change pp or vpp, or set first_stage_layers and last_stage_layers."
        )
    chunk = [count // layout.vpp for count in counts]
    stages = []
    for stage in range(layout.pp):
        starts = [virtual * sum(chunk) + sum(chunk[:stage]) for virtual in range(layout.vpp)]
        stages.append(tuple(range(start, start + chunk[stage]) for start in starts))
    return tuple(stages)
