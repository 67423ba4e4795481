"""What a row of the journal's table says of a sample, and back. A checksum goes over all of it."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson

from megarl.core.errors import MegarlError
from megarl.core.types import FloatArray, Prompt, Record, Sample, Status, TokenArray, VersionSpan
from megarl.data.blocks import laid
from megarl.data.images import identity
from megarl.rollout.tasks import GroupTask

# record: L token ids (int32), L log-probs (float32), L bytes of loss mask, label-aligned: see core/types.Record. routing: int16.
# columns: float32, those of core/types.Sample end to end; column_shapes: name and shape of each. images: number and digest of
# each that an environment showed; the files themselves are in a table of their own, each once. prompt_images: 0 where those of
# the prompt do not stand in it.
COLUMNS = (
    "row integer",
    "first integer",
    "position integer",
    "size integer",
    "written real",
    "id text",
    "prompt_crc integer",
    "prompt_text text",
    "prompt_tokens integer",
    "record blob",
    "text text",
    "reward real",
    "parts text",
    "grade_failure text",
    "status text",
    "versions text",
    "metadata text",
    "numbers text",
    "routing blob",
    "routing_width integer",
    "starts text",
    "columns blob",
    "column_shapes text",
    "images text",
    "prompt_images integer",
    "crc integer",
)
NAMES = frozenset(column.split()[0] for column in COLUMNS)
# What samples have where a journal was written by an older megarl, which did not know the column.
SINCE = {"starts": "[]", "columns": None, "column_shapes": "[]", "images": "[]", "prompt_images": None}


class Damage(MegarlError):
    """What is written down is not what was written."""


def row_of(
    task: GroupTask, prompt: Prompt, position: int, sample: Sample, size: int, written: float
) -> tuple[Any, ...]:
    """The row of a sample.

    prompt: of the task's row. position: of the sample in its group. size: how many samples the group has, greedy ones with
    them. written: seconds since 1970.
    """
    memory = laid(sample).memory if sample.memory is None else sample.memory
    assert memory is not None
    routing = sample.routing
    values = (
        task.row,
        task.first,
        position,
        size,
        written,
        sample.id,
        prompt_crc(prompt),
        None if sample.prompt is prompt else sample.prompt.text,
        len(sample.prompt.token_ids),
        memory.tobytes(),
        sample.response_text,
        None if math.isnan(sample.reward) else float(sample.reward) + 0.0,  # SQLite gives -0.0 back as 0.0
        _json(sample.reward_parts),
        sample.grade_failure,
        sample.status.value,
        _json([list(span) for span in sample.versions]),
        _json(sample.metadata),
        _json(sample.numbers),
        None if routing is None else np.ascontiguousarray(routing, np.int16).tobytes(),
        0 if routing is None else routing.shape[1],
        _json(sample.starts),
        b"".join(np.ascontiguousarray(column, np.float32).tobytes() for column in sample.columns.values()) or None,
        _json([[name, *column.shape] for name, column in sample.columns.items()]),
        _json([[number, digest(image)] for number, image in sample.shown]),
        len(sample.prompt.images),
    )
    # Half a character, in what a grader or an environment said, is none that a file can hold.
    whole = tuple(each.encode(errors="replace").decode() if isinstance(each, str) else each for each in values)
    return (*whole, _crc(whole))


def digest(image: bytes) -> str:
    """What an image is found by: of its bytes."""
    return blake2b(image, digest_size=16).hexdigest()


def digests_of(row: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Number and digest of each image that a sample's environment showed. row: by its columns."""
    return [(number, each) for number, each in orjson.loads(row.get("images") or "[]")]


def read_sample(found: Mapping[str, Any], prompt: Prompt, images: Mapping[str, bytes] = MappingProxyType({})) -> Sample:
    """A sample again. found: the row by its columns, as its table has them. prompt: of its row of the data, now.

    images: by their digests, see `digests_of`. Raises Damage where the checksum, the prompt or an image is another.
    """
    row: dict[str, Any] = SINCE | dict(found)
    if row.keys() != NAMES:
        raise Damage(f"its table has other columns: {', '.join(sorted(row.keys() ^ NAMES))}")
    if _crc(tuple(value for name, value in found.items() if name != "crc")) != row["crc"]:
        raise Damage(f"the checksum of sample {row['id']} is another")
    if row["prompt_crc"] != prompt_crc(prompt):
        raise Damage(f"sample {row['id']} answers another prompt than the row has now")
    shown = tuple((number, images.get(name, b"")) for number, name in digests_of(row))
    if any(digest(image) != name for (_, image), (_, name) in zip(shown, digests_of(row), strict=True)):
        raise Damage(f"an image of sample {row['id']} is another, or is gone")
    memory = np.frombuffer(row["record"], np.uint8).copy()
    record = Record.of(memory)
    response = slice(row["prompt_tokens"] - 1, len(record.tokens) - 1)
    width = row["routing_width"]
    return Sample(
        id=row["id"],
        group_id=row["id"].rpartition("/")[0],
        prompt=_asked(prompt, row["prompt_text"], record.tokens[: row["prompt_tokens"]], row["prompt_images"]),
        response_ids=record.tokens[row["prompt_tokens"] :],
        response_text=row["text"],
        loss_mask=record.loss_mask[response],
        rollout_logprobs=record.rollout_logprobs[response],
        versions=tuple(VersionSpan(*span) for span in orjson.loads(row["versions"])),
        status=Status(row["status"]),
        reward=float("nan") if row["reward"] is None else row["reward"],
        reward_parts=orjson.loads(row["parts"]),
        grade_failure=row["grade_failure"],
        metadata=orjson.loads(row["metadata"]),
        numbers=orjson.loads(row["numbers"]),
        routing=None if row["routing"] is None else np.frombuffer(row["routing"], np.int16).reshape(-1, width),
        memory=memory,
        starts=tuple(orjson.loads(row["starts"])),
        columns=_columns(row["columns"], orjson.loads(row["column_shapes"])),
        shown=shown,
    )


def _columns(blob: bytes | None, shapes: Sequence[Sequence[Any]]) -> dict[str, FloatArray]:
    ends = np.cumsum([math.prod(shape) for _, *shape in shapes])
    parts = np.split(np.frombuffer(blob or b"", np.float32), ends[:-1])
    return {name: part.reshape(shape) for (name, *shape), part in zip(shapes, parts, strict=False)}


def _asked(prompt: Prompt, text: str | None, token_ids: TokenArray, num_images: int | None) -> Prompt:
    """What the sample answered: the row's prompt, or another that was made of it."""
    return (
        prompt if text is None else replace(prompt, token_ids=token_ids, text=text, images=prompt.images[:num_images])
    )


def prompt_crc(prompt: Prompt) -> int:
    """What tells a prompt from others: of its id, its tokens and its images."""
    crc = zlib.crc32(prompt.id.encode(errors="replace"))
    for image in prompt.images:
        crc = zlib.crc32(identity(image).encode(errors="replace"), crc)
    return zlib.crc32(np.ascontiguousarray(prompt.token_ids, np.int32).tobytes(), crc)


def _json(value: Any) -> str:
    # Whoever adds to the metadata of a sample may add what JSON does not have: its words have to do.
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    except orjson.JSONEncodeError:  # half a character, in what an environment said
        return json.dumps(value, default=str, ensure_ascii=False).encode(errors="replace").decode()


def _crc(values: Sequence[Any]) -> int:
    crc = 0
    for value in values:
        crc = zlib.crc32(value if isinstance(value, bytes) else repr(value).encode(), crc)
    return crc
