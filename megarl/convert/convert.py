"""The three conversions: check everything first, run the ranks, commit what they wrote. Without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from megarl.convert.job import Job, Message, Operation
from megarl.convert.processes import folder_bytes, run_ranks
from megarl.convert.progress import ConversionProgress
from megarl.convert.sizes import weight_bytes
from megarl.convert.source import Source, require
from megarl.convert.target import apart, check_target, followed, open_target
from megarl.core.errors import MegarlError, UserError, naming
from megarl.core.layout import Layout
from megarl.core.ports import kept_port
from megarl.models.hf_config import load_model_config
from megarl.models.hf_dtypes import Dtypes, ModelDtype, stored_dtypes
from megarl.models.hf_files import check_weights
from megarl.models.layout_check import check_layout
from megarl.models.rules import expected_tensors
from megarl.training.manifest import Manifest, read_manifest, read_saved_config


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
    source: Path, target: Path, layout: Layout, dtype: ModelDtype | None, settings: Settings, console: Console
) -> Outcome:
    """Write a Megatron checkpoint, weights only, of an HF folder.

    dtype: of all weights, but for what Megatron has in float32 whatever the model is; None leaves each tensor its own, and
    FP8 becomes bfloat16.
    """
    found = require(source, "hf", "To change a checkpoint's layout call `megarl convert reshard`.")
    config = load_model_config(found.folder)
    check_layout(config, layout, "--tp, --pp, ...")
    index = check_weights(expected_tensors(config), found.folder, config)
    dtypes = stored_dtypes(index, config) if dtype is None else Dtypes(dtype, {})
    if dtypes is None:
        raise UserError(
            f"{found.folder} has tensors in F64, which no Megatron checkpoint holds. Say --dtype "
            f"{' or --dtype '.join(get_args(ModelDtype))}."
        )
    size, casts = weight_bytes(config, found.hf, dtypes), dtype is not None
    return _convert("hf-to-mcore", found, target, layout, dtypes, casts, size, settings, console)


def mcore_to_hf(
    source: Path, target: Path, layout: Layout, dtype: ModelDtype | None, settings: Settings, console: Console
) -> Outcome:
    """Write an HF folder of a checkpoint's weights, adapters merged. layout: how the model is held meanwhile.

    dtype: as for `hf_to_mcore`; None is what the checkpoint has, or had in the HF folder that it came from.
    """
    found = require(source, "mcore", "It can be loaded by transformers as it is.")
    config = read_saved_config(found.hf)
    check_layout(config, layout, "--tp, --pp, ...")
    dtypes = _dtypes(read_manifest(found.folder)) if dtype is None else Dtypes(dtype, {})
    size, casts = weight_bytes(config, found.hf, dtypes), dtype is not None
    return _convert("mcore-to-hf", found, target, layout, dtypes, casts, size, settings, console)


def reshard(source: Path, target: Path, layout: Layout, settings: Settings, console: Console) -> Outcome:
    """Write a checkpoint again at another layout, optimizer and schedule included where there are any."""
    found = require(source, "mcore", "To make a checkpoint of it call `megarl convert hf-to-mcore`.")
    check_layout(read_saved_config(found.hf), layout, "--tp, --pp, ...")
    manifest = read_manifest(found.folder)
    return _convert("reshard", found, target, layout, _dtypes(manifest), False, manifest.num_bytes, settings, console)


def _dtypes(manifest: Manifest) -> Dtypes:
    return Dtypes(manifest.dtype, manifest.stored)


def _convert(
    operation: Operation,
    source: Source,
    target: Path,
    layout: Layout,
    dtypes: Dtypes,
    casts: bool,
    num_bytes: int,
    settings: Settings,
    console: Console,
) -> Outcome:
    target = followed(target)
    apart(target, source.folder, source.hf)
    check_target(target, num_bytes, force=settings.force)
    verified: list[Message] = []
    with open_target(target) as output, kept_port("127.0.0.1") as meet:
        if operation != "mcore-to-hf":
            output.content.mkdir()
        job = Job(
            operation,
            source.folder.absolute(),
            output.content,
            source.hf.absolute(),
            layout,
            dtypes,
            casts,
            meet.getsockname()[1],
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

            with naming({output.content: target, output.temporary: target}), _reading(source.folder):
                run_ranks(job, listen, poll, timeout_s=settings.timeout_s)
            progress.done()
        differences = verified[0].differences if verified else ()
        written = folder_bytes(output.content)
        if not differences:
            output.commit()
    return Outcome(target, written, verified[0].done if verified else 0, differences)


@contextmanager
def _reading(source: Path) -> Iterator[None]:
    """Raises UserError for what goes wrong within where the source is gone since."""
    try:
        yield
    except MegarlError as error:
        if source.exists():
            raise
        raise UserError(
            f"{source} was removed while it was read: a run that goes on keeps its newest checkpoints alone (train.keep_last). "
            "Convert a newer one, or a copy; nothing was written."
        ) from error


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
