"""How few layers a role has to compute again for its devices to hold it: a search tries none and all, and leaves this open."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megarl.core.layout import stage_layers
from megarl.placement.cluster import Cluster
from megarl.placement.own import own_placement
from megarl.placement.workload import ACTOR, CRITIC, Workload
from megarl.recipe.layouts import role_layouts
from megarl.recipe.schema import Recipe


@dataclass(frozen=True)
class Spared:
    """A role that fits with fewer layers computed again.

    layers: of each virtual stage, of so many in the largest. seconds: saved a step.
    """

    role: str
    layers: int
    of: int
    seconds: float

    @property
    def words(self) -> str:
        """What to write into the recipe."""
        key = f"{self.role}.recompute_num_layers={self.layers}" if self.layers else f"{self.role}.recompute=none"
        return (
            f"{key} fits as well, by the prediction, in the place of all {self.of} layers of a stage: "
            f"{self.seconds:.2g} s a step less"
        )


def spared_layers(recipe: Recipe, workload: Workload, cluster: Cluster) -> Iterator[Spared]:
    """For each role that computes all layers again: the fewest that its own placement holds, where that is faster.

    Nothing where the placement does not fit as it is.
    """
    whole = own_placement(recipe, workload, cluster)
    if whole.problem is not None or whole.predicted is None:
        return
    for role in (ACTOR, CRITIC):
        section = getattr(recipe, role)
        if (
            role not in workload.models
            or section is None
            or section.recompute != "full"
            or section.recompute_num_layers
        ):
            continue
        cut = stage_layers(role_layouts(recipe)[role], workload.models[role].num_layers)
        most = max(len(part) for parts in cut for part in parts)

        def fits(layers: int, role: str = role, section: Any = section) -> bool:
            return own_placement(_with(recipe, role, section, layers), workload, cluster).problem is None

        layers = bisect_left(range(most), True, key=fits)
        if layers < most:
            fewer = own_placement(_with(recipe, role, section, layers), workload, cluster).predicted
            assert fewer is not None
            if (seconds := whole.predicted.step_s - fewer.step_s) > 0:
                yield Spared(role, layers, most, seconds)


def _with(recipe: Recipe, role: str, section: Any, layers: int) -> Recipe:
    update = {"recompute_num_layers": layers} if layers else {"recompute": "none"}
    return recipe.model_copy(update={role: section.model_copy(update=update)})
