"""The three conversions: check everything first, run the ranks, commit what they wrote. Without torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from megarl.convert.job import Dtype, Job, Message, Operation
from megarl.convert.processes import folder_bytes, run_ranks
from megarl.convert.progress import ConversionProgress
from megarl.convert.sizes import ITEM_BYTES, weight_bytes
from megarl.convert.source import Source, require
from megarl.convert.target import check_target, open_target
from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.models.hf_config import load_model_config
from megarl.models.hf_files import read_index
from megarl.models.layout_check import check_layout
from megarl.rollout.process import free_port
from megarl.training.manifest import read_manifest, read_model_config

SAFETENSORS_DTYPES: dict[str, Dtype] = {"F32": "float32", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Settings:
    """How to convert. timeout_s: longest time for all of it."""

    verify: bool = False
    force: bool = False
    timeout_s: float = 6 * 3600.0


@dataclass(frozen=True)
class Outcome:
    """What was done. differences: rows of tensor, field, before, after; the target was not written where there are any."""

    target: Path
    num_bytes: int
    num_verified: int
    differences: tuple[tuple[str, str, str, str], ...]


def make_layout(**axes: Any) -> Layout:
    """A layout of as few ranks as these axes need. Raises UserError where they do not fit each other."""
    sizes = {axis: axes.get(axis, 1) for axis in ("tp", "pp", "cp", "ep", "etp")}
    if any(size < 1 for size in sizes.values()):
        return Layout(**axes)  # says what is wrong
    dense, experts = (math.prod(sizes[axis] for axis in names) for names in (("tp", "cp", "pp"), ("etp", "ep", "pp")))
    return Layout(**axes, world_size=math.lcm(dense, experts))


def hf_to_mcore(
    source: Path, target: Path, layout: Layout, dtype: Dtype | None, settings: Settings, console: Console
) -> Outcome:
    """Write a Megatron checkpoint, weights only, of an HF folder. dtype: as in the files where not given."""
    found = require(source, "hf", "To change a checkpoint's layout call `megarl convert reshard`.")
    check_layout(load_model_config(found.folder), layout, "--tp, --pp, ...")
    dtype = dtype or _stored_dtype(found.folder)
    return _convert("hf-to-mcore", found, target, layout, dtype, weight_bytes(found.hf, dtype), settings, console)


def mcore_to_hf(
    source: Path, target: Path, layout: Layout, dtype: Dtype | None, settings: Settings, console: Console
) -> Outcome:
    """Write an HF folder of a checkpoint's weights, adapters merged. layout: how the model is held meanwhile."""
    found = require(source, "mcore", "It can be loaded by transformers as it is.")
    check_layout(read_model_config(found.hf), layout, "--tp, --pp, ...")
    dtype = dtype or cast(Dtype, read_manifest(found.folder).dtype)
    return _convert("mcore-to-hf", found, target, layout, dtype, weight_bytes(found.hf, dtype), settings, console)


def reshard(source: Path, target: Path, layout: Layout, settings: Settings, console: Console) -> Outcome:
    """Write a checkpoint again at another layout, optimizer and schedule included where there are any."""
    found = require(source, "mcore", "To make a checkpoint of it call `megarl convert hf-to-mcore`.")
    check_layout(read_model_config(found.hf), layout, "--tp, --pp, ...")
    manifest = read_manifest(found.folder)
    dtype = cast(Dtype, manifest.dtype)
    return _convert("reshard", found, target, layout, dtype, manifest.num_bytes, settings, console)


def _convert(
    operation: Operation,
    source: Source,
    target: Path,
    layout: Layout,
    dtype: Dtype,
    num_bytes: int,
    settings: Settings,
    console: Console,
) -> Outcome:
    if target.absolute() == source.folder.absolute():
        raise UserError(f"{target} is the source. Name another folder.")
    check_target(target, num_bytes, force=settings.force)
    verified: list[Message] = []
    with open_target(target) as output:
        if operation != "mcore-to-hf":
            output.content.mkdir()
        job = Job(
            operation,
            source.folder.absolute(),
            output.content,
            source.hf.absolute(),
            layout,
            dtype,
            free_port(),
            settings.timeout_s,
            settings.verify,
        )
        with ConversionProgress(console, operation, num_bytes) as progress:

            def listen(message: Message) -> None:
                progress.hear(message)
                if message.kind == "verified":
                    verified.append(message)

            def poll() -> None:
                if progress.phase == "writing":
                    progress.written(folder_bytes(output.temporary))

            run_ranks(job, listen, poll, timeout_s=settings.timeout_s)
            progress.done()
        differences = verified[0].differences if verified else ()
        written = folder_bytes(output.content)
        if not differences:
            output.commit()
    return Outcome(target, written, verified[0].done if verified else 0, differences)


def _stored_dtype(folder: Path) -> Dtype:
    """The one that most bytes of the folder are in."""
    sizes: dict[str, int] = {}
    for tensor in read_index(folder).values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + math.prod(tensor.shape)
    dtype = max(sizes, key=sizes.__getitem__)
    if dtype not in SAFETENSORS_DTYPES:
        raise UserError(f"{folder} is stored in {dtype}. Say --dtype {' or --dtype '.join(ITEM_BYTES)}.")
    return SAFETENSORS_DTYPES[dtype]


def outcome_json(outcome: Outcome) -> str:
    """For programs."""
    return json.dumps(
        {
            "target": str(outcome.target),
            "bytes": outcome.num_bytes,
            "tensors_verified": outcome.num_verified,
            "differences": [list(row) for row in outcome.differences],
        }
    )
