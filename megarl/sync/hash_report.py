"""What a comparison by hashes found (hashes.py), as the driver reads it. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from megarl.core.errors import SyncError

SHOWN = 4


@dataclass(frozen=True)
class HashReport:
    """What a comparison found. num_tensors: compared, on all ranks of all servers. failed: servers that gave no hashes, and why.

    wrong: server -> tensors that are not what was sent.
    """

    num_tensors: int
    failed: dict[str, str]
    wrong: dict[str, list[str]]


def refuse(wrong: Mapping[str, Sequence[str]], weight_version: int) -> None:
    """Raises SyncError, with names of tensors, where a server holds other weights than were sent."""
    if not wrong:
        return
    said = "; ".join(
        f"{name}: {len(found)} tensors, {', '.join(islice(found, SHOWN))}{', ...' if len(found) > SHOWN else ''}"
        for name, found in wrong.items()
    )
    raise SyncError(
        f"Weight version {weight_version} did not arrive as it was sent: hashes of tensors differ from the trainer's "
        f"(sync.verify: hash). {said}."
    )
