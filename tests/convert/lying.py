"""A rank of a conversion that reads each tensor one element late, as one does that believes a wrong offset."""

from __future__ import annotations

from typing import Any

from megarl.models import hf_read
from tests.convert import forked


def main() -> None:
    honest = hf_read.HfReader._stored

    def lying(self: Any, info: Any) -> Any:
        return honest(self, info) if info.shape[0] < 3 else honest(self, info).roll(1)

    hf_read.HfReader._stored = lying  # type: ignore[method-assign]
    forked.main()
