"""One placement with what is predicted of it: seconds by phase, bytes by pool, and what it takes more than another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.placement.cluster import Cluster
from megarl.placement.devices import GIB
from megarl.placement.partitions import Name

UNEVEN = ("first_stage_layers", "last_stage_layers")
PHASES = ("rollout", "sync", "sleep and wake", "prepare", "train", "between stages")


@dataclass(frozen=True)
class RolePlan:
    """One role's part. shape: its layout or its servers, in words. parts: seconds by stage and where they go.

    dispatch_s: of its samples, counted between the stages. host_bytes: of the host for each device, by what they are for.
    """

    role: str
    shape: str
    seconds: Mapping[str, float]
    parts: Mapping[str, Mapping[str, float]]
    held_bytes: Mapping[str, float]
    offloaded_bytes: float
    choice: Mapping[str, int | float | str | bool]
    host_bytes: Mapping[str, float]
    dispatch_s: float = 0.0


@dataclass(frozen=True)
class PoolPlan:
    """Devices first .. first + devices - 1, and the roles that share them. peak_bytes: of one device at its fullest.

    kind: the nodes that they are of; devices are counted kind by kind. named: whether there are several kinds. No devices:
    servers that somebody else started.
    """

    devices: int
    first: int
    roles: tuple[RolePlan, ...]
    peak_bytes: float
    peak_role: str
    kind: Cluster
    named: bool = False

    def describe(self) -> str:
        """`actor+rollout on 24`, or `on 24 H100` where there are several kinds of nodes."""
        roles = "+".join(role.role for role in self.roles)
        if not self.devices:
            return f"{roles} on external servers"
        return f"{roles} on {self.devices}{f' {self.kind.device.name}' if self.named else ''}"


@dataclass(frozen=True)
class PlacementPlan:
    """One placement with what is predicted of it."""

    names: tuple[Name, ...]
    asynchronous: bool
    pools: tuple[PoolPlan, ...]
    step_s: float
    phases: Mapping[str, float]

    def summary(self) -> str:
        """The prediction in one line."""
        phases = ", ".join(f"{name} {seconds:.2g}" for name, seconds in self.phases.items() if seconds > 0)
        peaks = ", ".join(f"{pool.peak_bytes / GIB:.2g} GiB ({pool.peak_role})" for pool in self.pools if pool.devices)
        return f"predicted: {self.describe()}; {self.step_s:.3g} s a step ({phases}); peak of a device: {peaks}"

    def describe(self) -> str:
        """`hybrid: actor+rollout on 24, critic on 8`."""
        pools = ", ".join(pool.describe() for pool in self.pools)
        return f"{self.names[0]}{', asynchronous' if self.asynchronous else ''}: {pools}"


def why_lost(plan: PlacementPlan, best: PlacementPlan) -> str:
    """Why it is not the pick: the phase that costs it most, beside the pick's."""
    if abs(plan.step_s - best.step_s) <= 1e-6 * best.step_s:
        return "as fast as the pick"
    if plan.step_s < best.step_s:
        return f"{best.step_s - plan.step_s:.3g} s faster than the pick: the search did not come upon it"
    more = {phase: plan.phases[phase] - best.phases[phase] for phase in PHASES}
    worst = max(more, key=lambda phase: more[phase])
    gains = {phase: -seconds for phase, seconds in more.items() if seconds < -0.05 * max(more[worst], 1e-9)}
    text = f"{worst} takes {plan.phases[worst]:.3g} s, {more[worst]:.3g} s more"
    if gains:
        best_gain = max(gains, key=lambda phase: gains[phase])
        text += f"; {best_gain} saves only {gains[best_gain]:.3g} s"
    return text
