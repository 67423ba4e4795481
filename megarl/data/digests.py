"""Digests of what rows say, by which a resumed run knows other rows from its own.

Not for whole files: a field that neither prompt nor answer is made of, nor the order (data.mix_key), may change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Digests = Mapping[str, str]  # by what they are of, such as the answers
NO_DIGESTS: Digests = MappingProxyType({})

TEMPLATE = "options of the chat template"  # rows rendered with others are other prompts
ROWS_AT_ONCE = 1024  # written at once: one by one, a million rows would take several times as long


class Digester:
    """Takes rows one by one, in their order, and holds few of them."""

    def __init__(self) -> None:
        self._found: dict[str, hashlib.blake2b] = {}
        self._waiting: list[Mapping[str, Any]] = []
        self._encode = json.JSONEncoder(default=str).encode

    def add(self, row: Mapping[str, Any]) -> None:
        """What the next row says, as JSON has it, by what it is. Each row has the same names."""
        self._waiting.append(row)
        if len(self._waiting) == ROWS_AT_ONCE:
            self._take()

    def digests(self) -> dict[str, str]:
        """Of all rows. Nothing may be added after it."""
        self._take()
        return {name: found.hexdigest() for name, found in self._found.items()}

    def _take(self) -> None:
        for name in self._waiting[0] if self._waiting else ():
            found = self._found.setdefault(name, hashlib.blake2b(digest_size=16))
            found.update(self._encode([row[name] for row in self._waiting]).encode())
        self._waiting.clear()


def differing(state: Mapping[str, Any], now: Digests) -> list[str]:
    """What of the rows is another than in a cursor's saved state. One of an older megarl has no digests, and differs in none."""
    was: Digests = state.get("digests", {})
    return [name for name, digest in now.items() if was.get(name, digest) != digest]
