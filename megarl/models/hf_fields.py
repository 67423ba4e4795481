"""Reads single values of an HF config.json; every refusal names the file, the key and the value. Without torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megarl.core.errors import UserError
from megarl.core.words import shortened

LARGEST = 2**31 - 1  # of a size, as kernels count
SHOWN_CHARACTERS = 200


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

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = LARGEST) -> int:
        """A whole number. Raises UserError."""
        value = self.get(key, default)
        if type(value) is not int or not least <= value <= most:
            self.refuse(key, value, f"a whole number from {least} to {most} is wanted")
        return value

    def counts(self, key: str, *, lone: bool = False) -> tuple[int, ...]:
        """A list of whole numbers from 0; empty where the key is missing. lone: one number stands for a list of it.

        Raises UserError.
        """
        value = self.get(key, [])
        found = [value] if lone and type(value) is int else value
        if not isinstance(found, list) or not all(type(each) is int and 0 <= each <= LARGEST for each in found):
            self.refuse(key, value, f"{'a whole number or ' if lone else ''}a list of whole numbers from 0 is wanted")
        return tuple(found)

    def words(self, key: str, *, lone: bool = False) -> tuple[str, ...]:
        """A list of strings; empty where the key is missing. lone: one string stands for a list of it. Raises UserError."""
        value = self.get(key, [])
        found = [value] if lone and isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            self.refuse(key, value, "a list of strings is wanted")
        return tuple(found)

    def number(self, key: str, default: float | None = None, *, least: float = 0.0) -> float:
        """A finite number over 0, and at least so much. Raises UserError."""
        value = self.get(key, default)
        if not _is_finite(value) or value <= 0 or value < least:
            self.refuse(key, value, f"a number {f'of at least {least:g}' if least else 'over 0'} is wanted")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number from 0, or None where the key is missing. Raises UserError."""
        value = self.get(key)
        if value is None:
            return None
        if not _is_finite(value) or value < 0:
            self.refuse(key, value, "a number from 0 is wanted")
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
        raise UserError(f"{self.path}: {key} is {shown(value)}; {wanted}. Export the model again.")


def refuse_feature(fields: Fields, what: str, architecture: str) -> NoReturn:
    """Raise UserError for what a config asks for and megarl's model does not do."""
    raise UserError(f"{fields.path}: {what} is not supported for {architecture}. Use a model without it.")


def _is_finite(value: object) -> bool:
    # A whole number of JSON may be larger than any float.
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def shown(value: object) -> str:
    """A value as Python writes it, cut where it is long: configs hold lists of a word for each layer."""
    try:
        return shortened(repr(value), SHOWN_CHARACTERS)
    except RecursionError:
        return "nested too deeply"
