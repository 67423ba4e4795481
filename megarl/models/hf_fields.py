"""Reads single values of an HF config.json; every refusal names the file, the key and the value. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megarl.core.errors import UserError


@dataclass(frozen=True)
class Fields:
    """The keys of a config.json, or of a part of it. A key whose value is null counts as missing."""

    raw: Mapping[str, Any]
    path: Path

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where the key is missing."""
        value = self.raw.get(key)
        return default if value is None else value

    def first(self, keys: tuple[str, ...]) -> str:
        """The first of these keys that is there; the first of all where none is."""
        return next((key for key in keys if self.raw.get(key) is not None), keys[0])

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number. Raises UserError."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(key, value, f"a whole number of at least {least} is wanted")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number over 0. Raises UserError."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self.refuse(key, value, "a number over 0 is wanted")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A number, or None where the key is missing. Raises UserError."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, value, "a number is wanted")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false. Raises UserError."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false is wanted")
        return value

    def part(self, key: str) -> Fields:
        """The object under a key; an empty one where it is missing. Raises UserError."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            self.refuse(key, value, "an object is wanted")
        return Fields(value, self.path)

    def refuse(self, key: str, value: Any, wanted: str) -> NoReturn:
        """Raise UserError for a value that cannot be."""
        raise UserError(f"{self.path}: {key} is {value!r}; {wanted}. Export the model again.")
