"""The section that says which roles share devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.recipe.section import PositiveInt, Section

RoleName = Literal["actor", "reference", "critic", "reward_model", "teacher"]


class Pool(Section):
    """Devices that some roles share, in turns; each role at a layout of its own over all of them."""

    devices: PositiveInt = Field(description="devices of the pool")
    roles: tuple[RoleName, ...] = Field(strict=False, description="the roles that it hosts")


class Placement(Section):
    """Which roles share devices; roles of different pools work at the same time."""

    name: Literal["auto", "colocate", "hybrid", "split", "standalone"] | None = Field(
        None,
        description="search pools, layouts and servers before the start: auto among all placements, else of that name; "
        "default: the recipe's own",
    )
    pools: dict[str, Pool] = Field(
        {}, description="pools by name, together cluster.devices; default: one pool that hosts every role"
    )
