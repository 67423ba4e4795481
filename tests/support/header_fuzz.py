"""Random safetensors files, ways to break their headers, and the judge: our reading against the safetensors library's."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, deserialize

from megarl.core.errors import UserError
from megarl.models.hf_files import TensorInfo
from megarl.models.hf_header import BITS, read_header
from megarl.models.hf_read import STORED_DTYPES, HfReader

Header = dict[str, Any]
Verdict = Literal["read alike", "refused by both", "refused by megarl alone"]
# Numbers, and what stands where a number ought to.
NUMBERS: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 7, 8, 2**31, 2**32, 2**53, 2**63, 2**64 - 1, 2**64, 10**30, -(2**63)),
    *(0.0, 1.0, 0.5, 1e300, math.nan, math.inf, True, False, None, "", "1", [], [1], {}, [[1]]),
)
NAMES = ("a", "b\n", "model.norm.weight", "", " ", "é", "\u0000", "__metadata__", "dtype", "x" * 300)


@dataclass(frozen=True)
class File:
    """header: as bytes, JSON or what is left of it. size: what the file says is the header's length; None is the truth."""

    header: bytes
    data: bytes
    size: int | None = None

    def content(self) -> bytes:
        size = len(self.header) if self.size is None else self.size
        return (size % 2**64).to_bytes(8, "little") + self.header + self.data


def example(rng: random.Random) -> tuple[Header, bytes]:
    """A header that is right, and its data."""
    header: Header = {"__metadata__": {"format": "pt"}} if rng.random() < 0.7 else {}
    end = 0
    for name in rng.sample(NAMES[:6], rng.randint(0, 4)):
        dtype = rng.choice(["F32", "BF16", "F16", "F64", "F8_E4M3", *BITS])
        shape = [rng.randint(0, 4) if rng.random() < 0.2 else rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
        if math.prod(shape) * BITS[dtype] % 8:
            shape.append(8)
        size = math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    entries = list(header.items())
    rng.shuffle(entries)
    return dict(entries), rng.randbytes(end)


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """Kind of what was done, and a file with one to three mutations of a right one."""
    header, data = example(rng)
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        kind, change = rng.choice(STRUCTURE)
        header = change(rng, json.loads(json.dumps(header)))
        done.append(kind)
    file = File(json.dumps(header, ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace"), data)
    if rng.random() < 0.4:
        kind, mangle = rng.choice(CONTENT)
        file = mangle(rng, file)
        done.append(kind)
    return done[-1], file.content()


def _entry(rng: random.Random, header: Header) -> Header | None:
    """One tensor's entry; None where there is none to change."""
    found = [entry for name, entry in header.items() if name != "__metadata__" and isinstance(entry, dict)]
    return rng.choice(found) if found else None


def _number(rng: random.Random, old: Any) -> Any:
    if isinstance(old, int) and rng.random() < 0.6:
        return old + rng.choice([-8, -4, -2, -1, 1, 2, 4, 8])
    return rng.choice(NUMBERS)


def _nothing(rng: random.Random, header: Header) -> Header:
    return header


def _dtype(rng: random.Random, header: Header) -> Header:
    if (entry := _entry(rng, header)) is not None:
        entry["dtype"] = rng.choice([*BITS, "F33", "f32", "", 4, None, [], {}])
    return header


def _shape(rng: random.Random, header: Header) -> Header:
    if (entry := _entry(rng, header)) is not None:
        shape = entry.get("shape")
        if not isinstance(shape, list) or rng.random() < 0.2:
            entry["shape"] = rng.choice([*NUMBERS, [1], [2, 2], [0], [2**32, 2**32], [2**63, 2], [0, 2**63]])
        elif shape and rng.random() < 0.7:
            index = rng.randrange(len(shape))
            shape[index] = _number(rng, shape[index])
        else:
            rng.choice([lambda: shape.append(1), lambda: shape.append(2), shape.reverse, shape.clear])()
    return header


def _offsets(rng: random.Random, header: Header) -> Header:
    if (entry := _entry(rng, header)) is not None:
        offsets = entry.get("data_offsets")
        if not isinstance(offsets, list) or rng.random() < 0.2:
            entry["data_offsets"] = rng.choice([*NUMBERS, [0, 4], [4, 0], [0, 4, 4], [2**64 - 4, 0]])
        elif offsets:
            index = rng.randrange(len(offsets))
            offsets[index] = _number(rng, offsets[index])
    return header


def _shift(rng: random.Random, header: Header) -> Header:
    """Both offsets of a tensor move: a gap on one side, an overlap on the other."""
    entry = _entry(rng, header)
    if entry is not None and isinstance(entry.get("data_offsets"), list):
        by = rng.choice([-8, -4, -2, 2, 4, 8])
        entry["data_offsets"] = [each + by if isinstance(each, int) else each for each in entry["data_offsets"]]
    return header


def _swap(rng: random.Random, header: Header) -> Header:
    """Two tensors trade one field: offsets, shapes or dtypes."""
    one, other = _entry(rng, header), _entry(rng, header)
    key = rng.choice(["data_offsets", "shape", "dtype"])
    if one is not None and other is not None and key in one and key in other:
        one[key], other[key] = other[key], one[key]
    return header


def _drop(rng: random.Random, header: Header) -> Header:
    entry = _entry(rng, header)
    if entry and rng.random() < 0.5:
        entry.pop(rng.choice(list(entry)))
    elif header:
        header.pop(rng.choice(list(header)))
    return header


def _add(rng: random.Random, header: Header) -> Header:
    entry = _entry(rng, header)
    kind = rng.randrange(3)
    if kind == 0 and entry is not None:
        entry[rng.choice(["extra", "Shape", "data_offset", ""])] = rng.choice(NUMBERS)
    elif kind == 1 and entry is not None:
        header[rng.choice(NAMES)] = json.loads(json.dumps(entry))  # a second tensor over the same bytes
    else:
        header[rng.choice(NAMES)] = rng.choice([*NUMBERS, {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}])
    return header


def _metadata(rng: random.Random, header: Header) -> Header:
    header["__metadata__"] = rng.choice([*NUMBERS, {"a": 1}, {"a": None}, {"a": "b"}, {"a": {"b": "c"}}, {"": ""}])
    return header


def _flip(rng: random.Random, file: File) -> File:
    """Bytes of the header change."""
    text = bytearray(file.header)
    for _ in range(rng.randint(1, 3)):
        if text:
            text[rng.randrange(len(text))] = rng.choice([*b'{}[]",:0123456789.-eE \\tn\x00\xff', rng.randrange(256)])
    return File(bytes(text), file.data, file.size)


def _splice(rng: random.Random, file: File) -> File:
    """A piece of the header is said twice, or left out: keys and fields that come again, commas too many."""
    text = file.header
    start, stop = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    piece = rng.choice([b"", text[start:stop] * 2, b"[" * 2000, b"\\ud800", b"-", b'"', b"1e5"])
    return File(text[:start] + piece + text[stop:], file.data, file.size)


def _repeat(rng: random.Random, file: File) -> File:
    """A whole key, or a whole field, comes again, perhaps with another value."""
    text = file.header.decode("utf-8", "replace")
    piece = rng.choice(
        [
            '"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, ',
            '"shape": [1], ',
            '"dtype": "F32", ',
            '"__metadata__": {"a": "b"}, ',
        ]
    )
    braces = [index + 1 for index, character in enumerate(text) if character == "{"]
    at = rng.choice(braces) if braces else 0
    return File((text[:at] + piece + text[at:]).encode("utf-8", "replace"), file.data, file.size)


def _pad(rng: random.Random, file: File) -> File:
    blank = rng.choice([b" ", b"\n", b"\t", b"\x00", b"\x0c", b"x"]) * rng.randint(1, 9)
    return File(rng.choice([blank + file.header, file.header + blank]), file.data, file.size)


def _length(rng: random.Random, file: File) -> File:
    """The header's length is a lie."""
    size = (
        len(file.header) + rng.choice([-8, -1, 1, 8]) if rng.random() < 0.7 else rng.choice([0, 10**8 + 1, 2**63, -1])
    )
    return File(file.header, file.data, size)


def _data(rng: random.Random, file: File) -> File:
    """The data are too short, or too long."""
    cut = rng.randint(1, 9)
    data = file.data[:-cut] if rng.random() < 0.5 else file.data + rng.randbytes(cut)
    return File(file.header, data, file.size)


STRUCTURE: tuple[tuple[str, Callable[[random.Random, Header], Header]], ...] = (
    ("nothing", _nothing),
    ("dtype", _dtype),
    ("shape", _shape),
    ("offsets", _offsets),
    ("shift", _shift),
    ("swap", _swap),
    ("drop", _drop),
    ("add", _add),
    ("metadata", _metadata),
)
CONTENT: tuple[tuple[str, Callable[[random.Random, File], File]], ...] = (
    ("flip", _flip),
    ("splice", _splice),
    ("repeat", _repeat),
    ("pad", _pad),
    ("length", _length),
    ("data", _data),
)


def judge(content: bytes, path: Path) -> Verdict:
    """Read the content, written to `path`, and compare. An error other than UserError comes through.

    Raises AssertionError where megarl reads what the library refuses, or reads something else.
    """
    path.write_bytes(content)
    try:
        theirs = dict(deserialize(content))
    except SafetensorError:
        theirs = None
    try:
        ours = read_header(path)
    except UserError as error:
        assert "\n" not in str(error), error
        assert str(path) in str(error), error
        return "refused by both" if theirs is None else "refused by megarl alone"
    assert theirs is not None, ours
    assert [each.name for each in ours] == sorted(theirs, key=[each.name for each in ours].index)
    for each in ours:
        its = theirs[each.name]
        assert (list(each.shape), each.dtype) == (its["shape"], its["dtype"])
        assert content[each.offset : each.offset + each.num_bytes] == bytes(its["data"])
    _compare_values({each.name: TensorInfo(each.shape, each.dtype, path, each.offset) for each in ours}, theirs)
    return "read alike"


def _compare_values(index: dict[str, TensorInfo], theirs: dict[str, Any]) -> None:
    """The reader of weights too, of what it reads at all."""
    wanted = {
        name: info
        for name, info in index.items()
        if info.dtype in STORED_DTYPES and info.shape and math.prod(info.shape)
    }
    targets = {name: torch.empty(info.shape) for name, info in wanted.items()}
    with HfReader(wanted, check_finite=False) as reader:
        for name, target in targets.items():
            rows = len(target.flatten(0, 1) if target.dim() == 3 else target)
            reader.read(name, slice(0, rows), None, target)
        reader.finish()
    for name, target in targets.items():
        its = torch.frombuffer(bytearray(theirs[name]["data"]), dtype=STORED_DTYPES[wanted[name].dtype])
        assert torch.equal(target.view(torch.int32).flatten(), its.float().view(torch.int32)), name
