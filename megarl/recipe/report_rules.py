"""Rules about what a run reports: steps that it has, and ranks."""

from __future__ import annotations

from megarl.recipe.rule import Contradiction
from megarl.recipe.schema import AnyRecipe, Recipe


def _late(recipe: AnyRecipe) -> list[int]:
    """Steps that are to be profiled and that the run does not have; how long one of epochs is, its rows say."""
    profiler, last = recipe.report.profiler, recipe.train.steps
    return [] if profiler is None or not last else [step for step in profiler.steps if step > last]


def _pools(recipe: AnyRecipe) -> list[int]:
    """Devices of each pool of ranks, or of all together where they are to be searched for."""
    pools = recipe.placement.pools.values() if isinstance(recipe, Recipe) else ()
    return [pool.devices for pool in pools] or [recipe.cluster.devices]


def _beyond(recipe: AnyRecipe) -> list[int]:
    """Ranks that are to be profiled and that no pool has."""
    profiler = recipe.report.profiler
    return [] if profiler is None else [rank for rank in profiler.ranks if rank >= max(_pools(recipe))]


REPORT_CONTRADICTIONS = (
    Contradiction(
        "report.profiler.steps",
        lambda r, _: bool(_late(r)),
        lambda r: f"step {_late(r)[0]} is behind the run's last (train.steps={r.train.steps}). Name steps that it has",
    ),
    Contradiction(
        "report.profiler.ranks",
        lambda r, _: bool(_beyond(r)),
        lambda r: (
            f"there is no rank {_beyond(r)[0]}: the largest pool has {max(_pools(r))}, counted from 0. Name ranks that there are"
        ),
    ),
)
