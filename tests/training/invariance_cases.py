"""Which models and layouts are measured for parallel invariance, and on what data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl.core.layout import Layout
from megarl.core.types import MicroBatch, MiniBatch, Shard
from tests.training.harness import VOCAB
from tests.training.invariance import MICRO_BATCHES, MODELS, PERTURBED, Case
from tests.training.samples import Example, examples, shards

NUM_STEPS = 3
# Adam turns gradients that are all rounding into whole steps, of any sign: eps is above what rounding leaves of these.
ADAM_EPS = 1e-5
FEW = 2  # micro-batches
BUDGET = 64  # tokens; the longest sequence fills a micro-batch
# Enough for four micro-batches on each of four shards: then each holds one sequence, some of length 1.
LENGTHS = [BUDGET, 1, 17, 5, 33, 1, 2, BUDGET, 9, 23, 40, 3, 12, 1, 28, 7]
MINIS = [examples(LENGTHS[step:] + LENGTHS[:step], VOCAB, step) for step in range(NUM_STEPS)]
# Lengths of the sequences of each micro-batch that is scored: the budget in one, in two, and between empty ones; only ones.
SCORED = [[BUDGET], [1], [BUDGET // 2, BUDGET // 2], [1, 1, 1], [0, BUDGET, 0], [17, 0, 5, 1, 30]]

Sizes = dict[str, Any]

ONE = Layout()
SP: Sizes = {"sequence_parallel": True}
# By model and number of ranks.
LAYOUTS: dict[tuple[str, int], list[Sizes]] = {
    ("dense", 2): [{"tp": 2, **SP}, {"pp": 2, "vpp": 2}, {"pp": 2, "last_stage_layers": 1}, {"cp": 2}, {}],
    ("dense", 4): [
        {"tp": 4, **SP},
        {"tp": 2, **SP},
        {"pp": 2, "vpp": 2, "tp": 2, **SP},
    ],
    ("tied", 2): [{"pp": 2, "vpp": 2}],  # tensor parallel: in TOGETHER
    ("deep", 2): [{"pp": 2, "vpp": 2, "first_stage_layers": 2}],
    ("deep", 4): [{"pp": 4, "first_stage_layers": 1, "last_stage_layers": 1}],
    ("local", 2): [{"tp": 2, **SP}, {"pp": 2}, {"cp": 2}],
    ("moe", 2): [{"tp": 2, **SP, "ep": 2}, {"tp": 2, **SP, "etp": 2}, {"cp": 2, "ep": 2}, {"etp": 2}],
    ("moe", 4): [{"ep": 2, "etp": 2}, {"tp": 2, **SP, "cp": 2, "ep": 2}, {"pp": 2, "cp": 2, "ep": 2}],
    ("critic", 2): [{"tp": 2, **SP}, {"pp": 2, "vpp": 2}, {"cp": 2}],
    ("reward", 2): [{"cp": 2}],  # its head is the critic's
    ("preference", 2): [{"cp": 2}],
    ("labelled", 2): [{"cp": 2}],
    ("distilled", 2): [{"tp": 2, **SP}, {"cp": 2}],
    ("mla", 2): [{"tp": 2, **SP}, {"pp": 2, "vpp": 2}, {"cp": 2, "ep": 2}],
    ("gated", 2): [{"tp": 2, **SP, "ep": 2}],
    ("gate in one", 2): [{"tp": 2, **SP}],
    ("qkv in one", 2): [{"tp": 2, **SP}],
    ("growing queries", 2): [{"cp": 2}],
    ("partly rotated", 2): [{"tp": 2, **SP, "ep": 2}, {"cp": 2}],
    ("scaled", 2): [{"pp": 2}],
    ("scaled, experts", 2): [{"tp": 2, **SP, "etp": 2}],
    ("norms behind", 2): [{"tp": 2, **SP}],
    ("no positions", 2): [{"pp": 2}],
    ("whole norms, experts", 2): [{"tp": 2, **SP, "ep": 2}],
    ("bias behind attention", 2): [{"tp": 2, **SP}],
    ("whole norms, partly rotated", 2): [{"tp": 2, **SP, "ep": 2}],
    ("learned activation", 2): [{"tp": 2, **SP}],
    ("neighbours", 2): [{"cp": 2}],
    ("biased softmax", 2): [{"tp": 2, **SP, "ep": 2}],
    ("norms behind rotation", 2): [{"tp": 2, **SP}],
    ("norms behind rotation, experts", 2): [{"tp": 2, **SP, "etp": 2}],
    ("mla, softmax", 2): [{"tp": 2, **SP, "ep": 2}],
    ("layered heads", 2): [{"tp": 2, **SP}, {"pp": 2}, {"cp": 2}],
    ("layered heads, experts", 2): [{"tp": 2, **SP, "ep": 2}, {"tp": 2, **SP, "etp": 2}],
    ("sinks", 2): [{"tp": 2, **SP}, {"tp": 2, **SP, "ep": 2}],
    ("linear", 2): [{"tp": 2, **SP}],
    ("linear, experts", 2): [{"tp": 2, **SP, "ep": 2}],
}
# What the benchmark measures beside them: the axes one by one, and more of their products.
MORE_LAYOUTS: dict[tuple[str, int], list[Sizes]] = {
    ("dense", 2): [{"tp": 2}, {"pp": 2}, {"pp": 2, "first_stage_layers": 1}],
    ("dense", 4): [
        {"tp": 4},
        {"cp": 4},
        {"pp": 4},
        {},
        {"tp": 2, "cp": 2, **SP},
        {"tp": 2, "pp": 2},
        {"pp": 2},
        {"cp": 2},
        {"pp": 2, "cp": 2},
        {"pp": 2, "vpp": 2, "cp": 2},
    ],
    ("tied", 2): [{"tp": 2, **SP}],
    ("tied", 4): [{"tp": 2, **SP, "pp": 2}, {"pp": 2}],
    ("deep", 2): [{"pp": 2, "vpp": 3}],
    ("local", 4): [{"tp": 2, **SP, "cp": 2}],
    ("moe", 2): [{"tp": 2, **SP}, {"pp": 2}, {"cp": 2}, {"ep": 2}, {}],
    ("moe", 4): [
        {"ep": 4},
        {"ep": 2},
        {"tp": 2, **SP, "ep": 4},
        {"tp": 2, **SP, "ep": 2, "etp": 2},
        {"tp": 4, **SP, "ep": 2, "etp": 2},
        {"cp": 2, "ep": 4},
        {"pp": 2, "ep": 2},
        {"pp": 2, "tp": 2, **SP, "etp": 2},
    ],
    ("critic", 2): [{"tp": 2}, {"pp": 2}, {}],
    ("critic", 4): [{"tp": 2, **SP, "pp": 2}, {"cp": 2, "pp": 2}],
    ("reward", 2): [{"tp": 2, **SP}, {"pp": 2, "vpp": 2}, {}],
    ("reward", 4): [{"tp": 2, **SP, "cp": 2}, {"cp": 2}],
    ("preference", 2): [{"tp": 2, **SP}, {"pp": 2, "vpp": 2}, {}],
    ("preference", 4): [{"tp": 2, **SP, "cp": 2}, {"cp": 2}],
    ("labelled", 2): [{"tp": 2, **SP}, {"pp": 2, "vpp": 2}, {}],
    ("labelled", 4): [{"tp": 2, **SP, "cp": 2}, {"cp": 2}],
    ("distilled", 2): [{"tp": 2}, {"pp": 2, "vpp": 2}, {"pp": 2}, {}],
    ("distilled", 4): [{"tp": 2, **SP, "cp": 2}, {"tp": 4}, {"tp": 2, "pp": 2, "vpp": 2}],
    ("mla", 4): [{"tp": 2, **SP, "pp": 2, "vpp": 2, "ep": 2}, {"cp": 2, "ep": 4}],
    ("gated", 2): [{"tp": 2, **SP, "etp": 2}, {"cp": 2, "ep": 2}, {"pp": 2}],
    ("gated", 4): [{"tp": 2, **SP, "pp": 2, "ep": 2}, {"tp": 2, **SP, "cp": 2, "ep": 2}],
    ("gate in one", 2): [{"cp": 2}, {"pp": 2}],
    ("qkv in one", 2): [{"cp": 2}, {"pp": 2}],
    ("qkv in one", 4): [{"tp": 4, **SP}, {"tp": 2, **SP, "pp": 2}],
    ("gate in one", 4): [{"tp": 2, **SP, "pp": 2}, {"tp": 2, **SP, "cp": 2}],
    ("growing queries", 2): [{"tp": 2, **SP}, {"pp": 2}],
    ("growing queries", 4): [{"cp": 4}, {"tp": 2, **SP, "cp": 2}],
    ("partly rotated", 2): [{"pp": 2}, {"ep": 2}],
    ("partly rotated", 4): [{"tp": 2, **SP, "pp": 2, "ep": 2}, {"pp": 2, "cp": 2}],
    ("scaled", 2): [{"tp": 2, **SP}, {"cp": 2}],
    ("scaled, experts", 2): [{"tp": 2, **SP}, {"cp": 2}, {"pp": 2}, {"ep": 2}],
    ("norms behind", 2): [{"tp": 2}, {"cp": 2}, {"pp": 2}],
    ("norms behind", 4): [{"tp": 2, **SP, "pp": 2}, {"tp": 2, **SP, "cp": 2}],
    ("no positions", 2): [{"tp": 2, **SP}, {"cp": 2}, {"pp": 2, "vpp": 2}],
    ("whole norms, experts", 2): [{"tp": 2, **SP}, {"cp": 2}, {"pp": 2}, {"ep": 2}],
    ("bias behind attention", 2): [{"tp": 2}, {"cp": 2}, {"pp": 2}],
    ("bias behind attention", 4): [{"tp": 2, **SP, "pp": 2}, {"tp": 2, **SP, "cp": 2}],
    ("whole norms, partly rotated", 2): [{"tp": 2, **SP}, {"cp": 2}, {"pp": 2}, {"ep": 2}],
    ("whole norms, partly rotated", 4): [{"tp": 2, **SP, "pp": 2, "ep": 2}, {"tp": 2, **SP, "cp": 2, "ep": 2}],
    ("learned activation", 2): [{"tp": 2}, {"cp": 2}, {"pp": 2}],
    ("learned activation", 4): [{"tp": 2, **SP, "pp": 2}, {"tp": 2, **SP, "cp": 2}],
    ("neighbours", 2): [{"tp": 2, **SP}, {"pp": 2}],
    ("biased softmax", 2): [{"tp": 2, **SP}, {"cp": 2}, {"pp": 2}, {"ep": 2}],
    ("biased softmax", 4): [{"tp": 2, **SP, "pp": 2, "ep": 2}, {"tp": 2, **SP, "cp": 2, "ep": 2}],
    ("norms behind rotation", 2): [{"tp": 2}, {"cp": 2}, {"pp": 2}],
    ("norms behind rotation", 4): [{"tp": 2, **SP, "pp": 2}, {"tp": 2, **SP, "cp": 2}],
    ("norms behind rotation, experts", 2): [{"tp": 2, **SP, "ep": 2}, {"cp": 2}, {"pp": 2}, {"ep": 2}],
    ("mla, softmax", 2): [{"tp": 2, **SP}, {"cp": 2}, {"pp": 2}, {"ep": 2}],
    ("mla, softmax", 4): [{"tp": 2, **SP, "pp": 2, "ep": 2}, {"cp": 2, "ep": 4}],
    ("sinks", 2): [{"cp": 2}, {"pp": 2}, {"ep": 2}],
    ("linear", 2): [{"tp": 2}, {"pp": 2}, {}],
    ("linear", 4): [{"tp": 2, **SP, "pp": 2}],
    ("linear, experts", 2): [{"tp": 2, **SP, "etp": 2}, {"pp": 2}, {"ep": 2}],
    ("linear, experts", 4): [{"tp": 2, **SP, "pp": 2, "ep": 2}],
    ("sinks", 4): [{"tp": 2, **SP, "pp": 2, "ep": 2}, {"tp": 2, **SP, "cp": 2, "ep": 2}],
}
RECOMPUTED = [
    Case("dense", ONE, "selective"),
    Case("dense", ONE, "full"),
    Case("moe", Layout(tp=2, ep=2, sequence_parallel=True, world_size=2), "full"),
]
MORE_RECOMPUTED = [
    Case("dense", Layout(cp=2, world_size=2), "full"),
    Case("dense", Layout(tp=2, sequence_parallel=True, world_size=2), "selective"),
    Case("dense", Layout(tp=2, pp=2, sequence_parallel=True, world_size=4), "full"),
]


def _cases(layouts: dict[tuple[str, int], list[Sizes]]) -> list[Case]:
    return [
        Case(model, Layout(world_size=ranks, **sizes)) for (model, ranks), each in layouts.items() for sizes in each
    ]


# A model's first case is its reference: one rank. A case of several micro-batches on one rank is among RECOMPUTED.
REFERENCES = [Case(model, ONE) for model in MODELS]
CASES = [*REFERENCES, *_cases(LAYOUTS), *RECOMPUTED]
ALL_CASES = [*CASES, *_cases(MORE_LAYOUTS), *MORE_RECOMPUTED]


# Experts with the loss that balances them. It is one for each micro-batch, and counts padding: here no sequence needs any,
# and the reference is one rank with the same micro-batches.
BALANCE_COEF, BALANCE_MICRO_BATCHES = 0.1, 2
BALANCE_MINI = examples([-(-length // 8) * 8 for length in LENGTHS], VOCAB)
_EVERYDAY_BALANCED: dict[tuple[str, int], list[Sizes]] = {
    ("moe", 2): [{"tp": 2, **SP, "etp": 2}, {"cp": 2, "ep": 2}],
    ("moe", 4): [{"tp": 2, **SP, "pp": 2, "ep": 2}],
}
_MORE_BALANCED: dict[tuple[str, int], list[Sizes]] = {
    ("moe", 2): [{"tp": 2, **SP}, {"pp": 2}, {"ep": 2}],
    ("moe", 4): [{"tp": 2, **SP, "cp": 2}, {"tp": 2, **SP, "ep": 4}],
}
BALANCED = _cases(_EVERYDAY_BALANCED)

# Roles of different layouts in the same processes, called in turn. The last is frozen.
TOGETHER: list[tuple[Case, ...]] = [
    (
        Case("dense", Layout(pp=2, vpp=2, world_size=2)),
        Case("tied", Layout(tp=2, world_size=2, sequence_parallel=True)),
        Case("deep", Layout(cp=2, world_size=2)),
    ),
]
_MORE_TOGETHER: list[tuple[Case, ...]] = [
    (Case("dense", Layout(tp=2, world_size=2)), Case("dense", Layout(pp=2, world_size=2))),
    (
        Case("dense", Layout(pp=2, vpp=2, world_size=4)),
        Case("tied", Layout(tp=2, pp=2, world_size=4, sequence_parallel=True)),
        Case("deep", Layout(cp=4, world_size=4)),
    ),
]
TOGETHER_MICRO_BATCHES = 4


def together_name(cases: tuple[Case, ...]) -> str:
    """All roles of a process."""
    return " with ".join(map(str, cases))


@dataclass(frozen=True)
class Extent:
    """How much is measured. minis: the mini-batches, one a step. micro_batches: in how many a case takes each.

    learns: whether a case takes steps of Adam; else it is measured up to the gradients of the first mini-batch.
    """

    cases: list[Case]
    balanced: list[Case]
    together: list[tuple[Case, ...]]
    minis: list[list[Example]]
    micro_batches: Callable[[Case], tuple[int, ...]]
    learns: Callable[[Case], bool]


def _cuts(case: Case) -> tuple[int, ...]:
    """In how many micro-batches the tests take a case: each model's reference in one, all others in several.

    Into how many does matter where stages hand them on, whatever model they have: that is one model's to show. The others have
    as few as there can be several.
    """
    if case in REFERENCES:
        return MICRO_BATCHES[:1]
    if case.model != "dense" and case.layout.pp <= FEW:
        return (FEW,)
    return MICRO_BATCHES if case.model == "dense" and case.layout.pp > 1 else MICRO_BATCHES[-1:]


def _learns(case: Case) -> bool:
    """An optimizer is given parameters and gradients: it tells those of experts, and one that two stages have, from the others.

    Whose they are, and by which loss, it does not know.
    """
    return case.model in ("dense", "tied", "moe", PERTURBED)


EVERYDAY = Extent(
    CASES, BALANCED, TOGETHER, MINIS[:2], _cuts, _learns
)  # the second step has the optimizer's state of the first
THOROUGH = Extent(
    ALL_CASES,
    [*BALANCED, *_cases(_MORE_BALANCED)],
    [*_MORE_TOGETHER, *TOGETHER],
    MINIS,
    lambda _: MICRO_BATCHES,
    lambda _: True,
)


@dataclass(frozen=True)
class Control:
    """A case with a mistake in it, which must be further from the reference than the bound."""

    mistake: str
    case: Case
    same_shard: bool = False  # every rank takes the first shard


CONTROLS = [
    Control("one of the tensors is larger by 1e-4", Case("perturbed", Layout(tp=2, world_size=2))),
    Control("both ranks train on the same shard", Case("dense", Layout(world_size=2)), same_shard=True),
]


def scored_shard(first: int) -> Shard:
    """The micro-batches of SCORED as one mini-batch, beginning with the micro-batch `first`."""
    order = [(first + index) % len(SCORED) for index in range(len(SCORED))]
    return Shard((MiniBatch(tuple(_scored(index) for index in order)),))


def _scored(index: int) -> MicroBatch:
    [shard], _ = shards([examples(SCORED[index], VOCAB, seed=index)])
    [mini] = shard.mini_batches
    [micro] = mini.micro_batches
    return micro
