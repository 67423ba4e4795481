"""What every rank of a process group says of itself, on every rank."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def all_gather_objects(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """A small object of every rank of the group, by rank. group: None is that of all."""
    found: list[Any] = [mine] * dist.get_world_size(group)
    if len(found) > 1:
        dist.all_gather_object(found, mine, group=group)
    return found
