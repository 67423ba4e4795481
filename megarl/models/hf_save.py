"""Writes an HF folder that transformers loads, tensor by tensor as they come: no more than one bucket is held."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.core.disk import FULL, sync, sync_tree, write_all
from megarl.core.errors import MegarlError, UserError
from megarl.core.json_file import read_object
from megarl.models.carried import carried, carried_bytes, in_files
from megarl.models.config import ModelConfig
from megarl.models.families import FAMILIES, score_architecture
from megarl.models.hf_beside import CODE, copy_beside
from megarl.models.hf_files import TensorInfo, multimodal_of
from megarl.models.hf_fp8 import QUANTIZATION, scale_name
from megarl.models.hf_header import header_bytes
from megarl.models.hf_read import DTYPES, HfReader
from megarl.models.hf_stacked import Stack, Stacks
from megarl.models.hf_weights import Bucket
from megarl.models.multimodal import has_newer_names, scored_multimodal, whole_name
from megarl.models.rules import expected_tensors
from megarl.models.score_padding import name_padding
from megarl.models.tensor_copy import write_tensors
from megarl.models.weight_files import INDEX, SINGLE, some

CONFIG = "config.json"
DEFAULT_SHARD_BYTES = 5 * 2**30
LABELS = ("num_labels", "problem_type")  # what would say otherwise than the one label of a score, or refuse it
PIECE_BYTES = 8 * 2**20
SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def save_hf(
    buckets: Iterable[Bucket],
    config: ModelConfig,
    source_folder: Path,
    target_folder: Path,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    along: Mapping[str, TensorInfo] | None = None,
) -> None:
    """Write an HF folder that transformers loads: safetensors (with an index where there are several), config, tokenizer.

    Tensors keep the dtype that they come in, and the config names the one that most are in. The rest of the config, but
    for its quantisation, generation settings and tokenizer are the source folder's, and so is what pads, unless the model
    scores (score_padding.py). What is not trained is carried along from there (carried.py); of a model that sees images it is the
    whole multimodal folder, by the source's names. along: what was found to carry; None looks for it. Appears whole, by renaming;
    an earlier folder of that name is replaced.
    Raises UserError, and leaves nothing half-written, when the disk is too small.
    """
    temporary, previous = (target_folder.with_name(f".{kind}-{target_folder.name}") for kind in ("tmp", "previous"))
    along = carried(source_folder, config) if along is None else along
    for folder in (temporary, previous):
        if folder.exists():
            shutil.rmtree(folder)
    temporary.mkdir(parents=True)
    newer = _has_newer_names(along, config)
    stacks = config.vision is not None and multimodal_of(source_folder).stacked_experts
    with (
        _removed_on_failure(temporary),
        closing(
            _Shards(temporary, config, max_shard_bytes, target_folder, along, newer=newer, stacks=stacks)
        ) as shards,
        shards.explained(),
    ):
        for name, tensor in chain.from_iterable(buckets):
            shards.add(name, tensor)
        dtype = shards.finish()
        write_config(source_folder / CONFIG, temporary / CONFIG, str(dtype).removeprefix("torch."), config)
        copy_beside(source_folder, temporary, sees=config.vision is not None)
        if config.head == "score" and config.vision is None:  # transformers reads no score of others
            name_padding(temporary, target_folder)
        sync_tree(temporary)
    if target_folder.exists():
        target_folder.rename(previous)
    temporary.rename(target_folder)
    sync(target_folder.parent)
    if previous.exists():
        shutil.rmtree(previous)


def _has_newer_names(along: Mapping[str, TensorInfo], config: ModelConfig) -> bool:
    """Of a multimodal folder that is written. along: what is carried into it, a frozen tower among that."""
    if config.vision is None:
        return False
    return config.vision.newer_names if config.vision.tower else has_newer_names(along)


def write_carried(path: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, Any]]:
    """A new file of tensors that are carried along; returns what its header says of each. FP8 ones become bfloat16.

    Raises UserError where a source cannot be read whole.
    """
    scaled = {name: info for name, info in tensors.items() if info.scales is not None}
    scales = {scale_name(name): info.scales.info for name, info in scaled.items() if info.scales is not None}
    with HfReader(scaled | scales, check_finite=False) as reader:

        def content(name: str) -> memoryview:
            plain = torch.empty(scaled[name].shape, dtype=torch.bfloat16)
            reader.read(name, slice(0, len(plain)), None, plain)
            reader.finish()
            return memoryview(plain.view(-1).view(torch.uint8).numpy().data)

        return write_tensors(path, tensors, unscaled=content)


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder)
        raise


def write_config(source: Path, target: Path, dtype: str, config: ModelConfig) -> None:
    """The source's config, made that of unquantised weights in this dtype, with the head of the model and no code of its own.

    A reader casts to what the config says, and would round. Raises UserError where the source cannot be read.
    """
    raw = read_object(source, "Export the model again.")
    raw.update({key: dtype for key in ("dtype", "torch_dtype") if key in raw} or {"dtype": dtype})
    for key in (QUANTIZATION, CODE):
        raw.pop(key, None)
    if config.vision is None:
        # It needs no code of its own, and without it transformers and servers know no model.
        raw["model_type"] = FAMILIES[config.architecture].model_types[0]
    elif isinstance(part := raw.get("text_config"), dict):
        part.update({key: dtype for key in ("dtype", "torch_dtype") if key in part})
    if isinstance(raw["architectures"], str):
        raw["architectures"] = [raw["architectures"]]  # as transformers wants it
    if config.head == "score":
        seeing = config.vision is not None
        names = [*map(scored_multimodal, raw["architectures"])] if seeing else [score_architecture(config.architecture)]
        raw |= {"architectures": names, "id2label": {"0": "SCORE"}, "label2id": {"SCORE": 0}}
        for key in LABELS:
            raw.pop(key, None)
    target.write_text(json.dumps(raw, indent=2) + "\n")


class _Shards:
    """Safetensors files of at most about so many bytes, written as tensors come.

    A file begins with a header that says what is in it, which is not known yet: room is left for the largest that it can
    be, and the format allows blanks at its end.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        max_bytes: int,
        named: Path,
        along: Mapping[str, TensorInfo],
        *,
        newer: bool,
        stacks: bool,
    ) -> None:
        """named: what the folder will be called, for errors. along: what is carried into it beside the model.

        newer: names are those of `whole_name`. stacks: a layer's experts go into two tensors.
        """
        self._folder, self._max_bytes, self._named = folder, max_bytes, named
        self._missing, self._along = expected_tensors(config), along
        self._newer = newer
        self._numel = {name: torch.Size(shape).numel() for name, shape in self._missing.items()}
        self._file: FileIO | None = None
        self._entries: dict[str, dict[str, Any]] = {}
        self._size = self._room = self._itemsize = 0
        self._files: list[dict[str, dict[str, Any]]] = []
        self._bytes_in: dict[torch.dtype, int] = {}
        self._stacks = Stacks(self._missing if stacks else {})
        self._parts: dict[tuple[Stack, int], list[Tensor]] = {}
        self._matrices = 0  # of experts for which the file has room, and that are still to come

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor behind the others. Raises MegarlError for one that the model does not have, or has already."""
        if self._missing.pop(name, None) != tuple(tensor.shape):
            raise MegarlError(
                f"{name} {list(tensor.shape)} came in an export, and is no tensor of the model, or a second."
            )
        if not self._bytes_in:
            self._itemsize = tensor.itemsize
            self._check_space()
        self._bytes_in[tensor.dtype] = self._bytes_in.get(tensor.dtype, 0) + tensor.nbytes
        if (place := self._stacks.place(name)) is None:
            self._write(tensor, self._room_for({name: tuple(tensor.shape)}, tensor))
        else:
            self._stack(*place, tensor)

    def _stack(self, stack: Stack, expert: int, number: int, tensor: Tensor) -> None:
        """Write an expert's matrix with its last part."""
        if whole_name(stack.name, newer=self._newer) not in self._entries:
            beside = self._stacks.beside(stack)
            self._room_for({each.name: each.shape for each in beside}, tensor)
            self._matrices += sum(each.experts for each in beside)
        parts = self._parts.setdefault((stack, expert), [])
        assert number == len(parts), (stack, expert, number)
        parts.append(tensor.detach().to("cpu", copy=True))
        if len(parts) == stack.each:
            matrix = torch.cat(self._parts.pop((stack, expert)))
            begin = self._entries[whole_name(stack.name, newer=self._newer)]["data_offsets"][0]
            self._write(matrix.T if stack.exchanged else matrix, begin + expert * stack.elements * tensor.itemsize)
            self._matrices -= 1

    def _room_for(self, shapes: Mapping[str, tuple[int, ...]], tensor: Tensor) -> int:
        """Leave room for tensors of this one's dtype in one file; returns where the first begins."""
        sizes = {name: torch.Size(shape).numel() * tensor.itemsize for name, shape in shapes.items()}
        if self._file is not None and self._size + sum(sizes.values()) > self._max_bytes and not self._matrices:
            self._end_file()
        if self._file is None:
            self._open(shapes)
        first = self._size
        for name, shape in shapes.items():
            offsets = [self._size, self._size + sizes[name]]
            self._entries[whole_name(name, newer=self._newer)] = _entry(
                SAFETENSORS_NAMES[tensor.dtype], list(shape), offsets
            )
            self._size += sizes[name]
        return first

    def _write(self, tensor: Tensor, begin: int) -> None:
        """Its content, so many bytes behind where the first tensor of the file begins."""
        assert self._file is not None
        content = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        self._file.seek(self._room + begin)
        for piece in content.split(PIECE_BYTES):
            # A copy: numpy would hold on to storage that a role frees when it is offloaded.
            write_all(self._file, memoryview(piece.clone().numpy().data))

    def finish(self) -> torch.dtype:
        """Give the files their names, and an index where there are several; returns the dtype that most bytes are in.

        Raises MegarlError when tensors of the model are missing.
        """
        if self._missing or not self._bytes_in:
            raise MegarlError(f"The export ended without the tensors {some(sorted(self._missing))}.")
        self._end_file()
        for tensors in in_files(self._along, self._max_bytes):
            self._files.append(write_carried(self._part(len(self._files)), tensors))
        count = len(self._files)
        names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for number, name in enumerate(names):
            self._part(number).rename(self._folder / name)
        if count > 1:
            weight_map = {tensor: names[number] for number, entries in enumerate(self._files) for tensor in entries}
            total = sum(
                entry["data_offsets"][1] - entry["data_offsets"][0] for e in self._files for entry in e.values()
            )
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
            (self._folder / INDEX).write_text(text)
        return max(self._bytes_in, key=self._bytes_in.__getitem__)

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"

    def _open(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """A new file, with room for a header that names these tensors, and every one still to come."""
        longest = _entry("BF16", [], [10**15] * 2)
        coming = {**shapes, **self._missing}
        entries = {
            whole_name(each, newer=self._newer): {**longest, "shape": list(shape)} for each, shape in coming.items()
        }
        self._room = len(header_bytes(entries))
        self._file = FileIO(self._part(len(self._files)), "wb")

    def _end_file(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        write_all(self._file, header_bytes(self._entries, self._room))
        self._file.close()
        self._files.append(self._entries)
        self._file, self._entries, self._size = None, {}, 0

    def close(self) -> None:
        """Let go of a file that was not finished."""
        if self._file is not None:
            self._file.close()

    def _check_space(self) -> None:
        if shutil.disk_usage(self._folder).free < self._needed():
            raise self._too_small()

    def _needed(self) -> int:
        return sum(self._numel.values()) * self._itemsize + carried_bytes(self._along.values())

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What a full disk refuses within, of anything that goes into the folder. Raises UserError."""
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                raise self._too_small() from error
            raise

    def _too_small(self) -> UserError:
        free = shutil.disk_usage(self._folder).free
        return UserError(
            f"No room for the weights in {self._named}: they need {self._needed() / 1e9:.3f} GB, and "
            f"{free / 1e9:.3f} GB are free there (or a quota allows less). Free some space or choose another folder; "
            "nothing was left behind."
        )


def _entry(dtype: str, shape: list[int], offsets: list[int]) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}
