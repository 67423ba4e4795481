"""Reads JSONL and Parquet files as rows that know where they stand, so that every complaint names file, line and field.

Not for tokens or chat messages: what a field must hold is decided by prompts.py and sft.py.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from glob import escape
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.core.errors import UserError
from megarl.core.words import did_you_mean, nearest_beside
from megarl.hub.names import address

if TYPE_CHECKING:
    import pyarrow

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet", ".pq")
PARQUET_BATCH = 1024


@dataclass(frozen=True)
class Row:
    """One row of a file. `number` counts from 1: the line of a JSONL file, the row of a Parquet file."""

    path: Path
    number: int
    fields: dict[str, Any]

    @property
    def where(self) -> str:
        """The place, for an error message."""
        return f"{self.path}, {'row' if self.path.suffix in PARQUET_SUFFIXES else 'line'} {self.number}"

    @property
    def id(self) -> str:
        """`<file name>:<row number>`: stable between runs."""
        return f"{self.path.name}:{self.number}"

    def has(self, key: str) -> bool:
        """Whether the field is there and not null; `a.b` reaches into the object `a`."""
        return field_of(self.fields, key) is not None

    def get(self, key: str, purpose: str) -> Any:
        """The field's value; `a.b` reaches into the object `a`.

        purpose: which recipe key or role asks, for the message. Raises UserError where the field is missing or null.
        """
        value = field_of(self.fields, key)
        if value is None:
            raise self.missing(key, purpose)
        return value

    def missing(self, key: str, purpose: str) -> UserError:
        """The error for a field that is not there, with the fields that are, and the nearest."""
        if key in self.fields:
            return UserError(
                f"{self.where}: the field {key!r} ({purpose}) is null. Give it a value, or leave the row out."
            )
        there = ", ".join(sorted(map(repr, self.fields))) or "none"
        hint = did_you_mean(key, self.fields, quoted=True)
        return UserError(
            f"{self.where}: there is no field {key!r} ({purpose}). Fields of this row: {there}.{hint} "
            f"Rename the field, or name the right one in the recipe."
        )

    def said(self, value: Any) -> Any:
        """What the row says of an object in it, such as a schema: without the nulls that Parquet fills it up with.

        A column has one type: its objects have the keys of all rows' objects, and null where they have not got one.
        """
        return _without_nulls(value) if self.path.suffix in PARQUET_SUFFIXES else value


def field_of(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a row's field, dots into objects; None where there is none."""
    if name in fields:
        return fields[name]
    value: Any = fields
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def without_field(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A row's fields without this one, which `field_of` finds."""
    first, _, rest = name.partition(".")
    if name in fields or not isinstance(inner := fields.get(first), Mapping) or not rest:
        return {key: value for key, value in fields.items() if key != name}
    return {**fields, first: without_field(inner, rest)}


def data_files(path: Path) -> list[Path]:
    """The files that a path stands for: itself, or, where its name has a `*` and is no file's, those that match, by name."""
    if "*" not in path.name or path.exists():
        return [path]
    return sorted(path.parent.glob("*".join(map(escape, path.name.split("*")))))


def place_of(path: Path, row_id: str) -> str:
    """The place of a row of this file, or of one of those that a pattern stands for, for messages. row_id: `Row.id`."""
    name, _, number = row_id.rpartition(":")
    return Row(path.with_name(name), int(number), {}).where


def read_rows(path: Path) -> Iterator[Row]:
    """Stream the rows of a JSONL or Parquet file, or of several (`data_files`), one after the other.

    Blank lines of JSONL are passed over but counted.
    Raises UserError, naming file and line: file missing, unknown kind, malformed, not an object, or no rows at all.
    """
    if path.is_dir():
        inside = sorted(each.name for each in path.iterdir() if each.suffix in (*JSONL_SUFFIXES, *PARQUET_SUFFIXES))
        hint = f" Did you mean {path / inside[0]}?" if inside else ""
        raise UserError(f"{path} is a folder, where a data file is wanted.{hint} Correct the path in the recipe.")
    if path.suffix not in (*JSONL_SUFFIXES, *PARQUET_SUFFIXES):
        allowed = ", ".join((*JSONL_SUFFIXES, *PARQUET_SUFFIXES))
        raise UserError(f"{path}: unknown kind of data file {path.suffix!r}. Allowed are {allowed}.")
    files = data_files(path)
    if not files:
        raise UserError(f"{path}: no file matches this pattern. Correct the path in the recipe.")
    if files == [path] and not path.is_file():
        there = f"the folder {path.parent} {_is_there(path.parent)}"
        if url := address(path):
            raise UserError(f"{url} is an address. Download the file and give its path, or name a data set on the hub.")
        if os.path.lexists(path):
            there = "it is a link that leads nowhere" if path.is_symlink() else "it is no regular file"
        near = nearest_beside(path)
        hint = f" Did you mean {near}?" if near else ""
        raise UserError(f"{path}: there is no such data file ({there}).{hint} Correct the path in the recipe.")
    read = _read_parquet if path.suffix in PARQUET_SUFFIXES else _read_jsonl
    rows = chain.from_iterable(map(read, files))
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise UserError(f"{path}: the data file has no rows. Give it at least one, or name another file in the recipe.")


def _is_there(folder: Path) -> str:
    return "exists" if folder.is_dir() else "does not exist either"


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            # What Python would take for UTF-32.
            if line.startswith(b"\0\0\0\0") or not line.strip(b"\0\r\n"):
                raise UserError(
                    f"{where}: NUL bytes, as a file has that was not written to its end. Leave the line out, or write the file "
                    "again."
                )
            try:
                value = json.loads(line, object_pairs_hook=_object)
                if b"\\u" in line or b"\xed" in line:  # may be half a character, which no tokenizer takes
                    json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                raise UserError(
                    f"{where}: half a character (\\u{ord(error.object[error.start]):04x} without the other half of its "
                    "surrogate pair). Leave it out."
                ) from error
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{where}: not UTF-8 ({error.reason} at byte {error.start}). Save the file as UTF-8."
                ) from error
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{where}: malformed JSON ({error.msg} at column {error.colno}). "
                    "Each line holds one whole JSON object."
                ) from error
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{where}: JSON that cannot be read ({error}). Leave the row out, or write its value as a string."
                ) from error
            if not isinstance(value, dict):
                raise UserError(
                    f"{where}: {json_type(value)} where a JSON object is wanted. Each line holds one JSON object, "
                    'like {"prompt": "...", "answer": "..."}.'
                )
            yield Row(path, number, value)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        # Checksums of pages are looked at where the file has them.
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            _check_columns(path, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=PARQUET_BATCH):
                columns = [_values(path, name, batch.column(name)) for name in batch.schema.names]
                for values in zip(*columns, strict=True):
                    number += 1
                    yield Row(path, number, dict(zip(batch.schema.names, values, strict=True)))
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # a string that is not UTF-8 is a ValueError
        raise UserError(
            f"{path}: not a readable Parquet file, after {number} rows ({error}). Write it again."
        ) from error


def _values(path: Path, name: str, column: pyarrow.Array) -> list[Any]:
    """A column's values as Python has them. Raises UserError."""
    import pyarrow

    try:
        values: list[Any] = column.to_pylist()
        # Of a type's name, as nested types have it within theirs: looked for once, as most columns have no such numbers.
        few_bits = "float" in str(column.type)  # float, halffloat; 64 bits are a double
        return [_in_own_digits(value, column.type) for value in values] if few_bits else values
    except (pyarrow.ArrowException, OverflowError, ValueError) as error:  # dates that Python has not
        raise UserError(
            f"{path}: the column {name!r} ({column.type}) has a value that cannot be read ({error}). Write the column as text, "
            "or leave it out."
        ) from error


def _in_own_digits(value: Any, kind: pyarrow.DataType) -> Any:
    """A number of 16 or 32 bits as it is written, not as the 64 bits nearest to it: 0.1, and not 0.10000000149011612."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_float32(kind) or types.is_float16(kind):
        return value if value.is_integer() else float(str(kind.to_pandas_dtype()(value)))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_in_own_digits(each, kind.value_type) for each in value]
    if types.is_struct(kind):
        return {field.name: _in_own_digits(value[field.name], field.type) for field in kind}
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for two fields of one name, of which JSON's readers would take the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the field {twice!r} stands there more than once")
    return found


def _check_columns(path: Path, names: list[str]) -> None:
    """Raises UserError for two columns of one name, which Parquet can have, and of which a row would have the last."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise UserError(f"{path}: more than one column is named {', '.join(map(repr, twice))}. Rename all but one.")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


# Exact types: a bool is an int to isinstance.
_JSON_TYPES = {
    type(None): "null",
    bool: "true or false",
    str: "a string",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
    bytes: "bytes",
}


def json_type(value: object) -> str:
    """What JSON calls the type of a value, for messages: `a string`, `null`."""
    return _JSON_TYPES.get(type(value), f"a {type(value).__name__}")
