"""Safetensors files of an HF folder: what is in them, and whether it is what the config promises. Without torch.

What the headers say is the safetensors library's to judge (`hf_header`); how an index and its files, the weights and
their config go together is judged here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.core.errors import UserError
from megarl.core.json_file import read_object
from megarl.models.config import ModelConfig
from megarl.models.hf_fields import Fields
from megarl.models.hf_fp8 import FP8, SCALE_DTYPES, scale_name
from megarl.models.hf_header import BITS, read_header
from megarl.models.hf_mxfp4 import GROUP, STORED, blocks_name, blocks_shape, scales_name
from megarl.models.hf_stacked import STACKED_FAMILIES, stacked
from megarl.models.multimodal import TOWER, Multimodal, read_multimodal, text_names, tower_names
from megarl.models.predicting import predicting
from megarl.models.tower_tensors import check_tower
from megarl.models.weight_files import AGAIN, files_of, named_files, some

DTYPES = ("F64", "F32", "F16", "BF16")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BLOCK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Scales:
    """The scales of an FP8 tensor: one for each block of so many rows and columns."""

    info: TensorInfo
    block: tuple[int, int]


@dataclass(frozen=True)
class Packed:
    """What an MXFP4 tensor is made of."""

    blocks: TensorInfo
    scales: TensorInfo


@dataclass(frozen=True)
class Columns:
    """[first, first + the tensor's rows) of a matrix that is so wide."""

    first: int
    width: int


@dataclass(frozen=True)
class TensorInfo:
    """One tensor on disk. scales: of an FP8 tensor. packed: of an MXFP4 tensor, whose file and offset are its blocks'.

    columns: it lies with rows and columns exchanged, as these columns of a matrix, whose file and offset they are.
    """

    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: F32, BF16
    file: Path
    offset: int  # of the first byte in the file
    scales: Scales | None = None
    packed: Packed | None = None
    columns: Columns | None = None


def read_index(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the model's files, from the headers alone.

    Raises UserError for files that are missing, broken or cut off, for a tensor that two of them hold, and for an index
    that says something else than they do.
    """
    named, found = named_files(folder), dict[str, TensorInfo]()
    twice, unnamed = [], []
    for path in files_of(folder, named):
        for stored in read_header(path):
            if stored.name in found:
                twice.append(f"{stored.name} in {found[stored.name].file.name} and {path.name}")
            elif named is not None and stored.name not in named:
                unnamed.append(f"{stored.name} in {path.name}")
            found[stored.name] = TensorInfo(stored.shape, stored.dtype, path, stored.offset)
    elsewhere = [
        f"{name} in {named[name]}, and it is in {info.file.relative_to(folder)}"
        for name, info in found.items()
        if named is not None and name in named and folder / named[name] != info.file
    ]
    said = {"the index names": elsewhere, "the index does not name": unnamed, "two files hold": twice}
    problems = [f"{what} {some(names)}" for what, names in said.items() if names]
    if problems:
        raise UserError(
            f"The weights in {folder} contradict each other: {'; '.join(problems)}. Which of them counts is not the same "
            f"in every library. {AGAIN}"
        )
    return found


def check_weights(expected: dict[str, tuple[int, ...]], folder: Path, config: ModelConfig) -> dict[str, TensorInfo]:
    """The index of a folder whose weights are those that the config describes; FP8 tensors come with their scales.

    Of a multimodal model it is as `of_model` gives it. expected: HF name -> shape.
    Raises UserError, with names and shapes, when they are not. What megarl has no use for is
    no mistake: see `_unused`; nor are layers that predict further tokens (`predicting`).
    """
    return check_index(expected, of_model(read_index(folder), folder, config), folder, config)


def of_model(index: dict[str, TensorInfo], folder: Path, config: ModelConfig) -> dict[str, TensorInfo]:
    """Of a multimodal folder's index the text part, by the names of a folder of its own, and a tower that learns; of others all.

    Raises UserError.
    """
    if config.vision is None:
        return index
    names = names_of_text(index, folder)
    tower = {name: info for name, info in index.items() if TOWER in name}
    check_tower(_config_of(folder).part("vision_config"), {name: info.shape for name, info in tower.items()}, folder)
    if config.vision.tower:
        names |= {TOWER + part: name for part, name in tower_names(tower).items()}
    ours = {text: index[name] for text, name in names.items()}
    return ours | {name: index[name] for name in predicting(index, config)}


def names_of_text(index: Iterable[str], folder: Path) -> dict[str, str]:
    """Of a multimodal folder: what tensors of its text part would be called alone -> what they are here. Raises UserError."""
    return text_names(index, multimodal_of(folder), folder)


def multimodal_of(folder: Path) -> Multimodal:
    """What a multimodal folder's config.json names. Raises UserError."""
    return read_multimodal(_config_of(folder))


def _config_of(folder: Path) -> Fields:
    path = folder / "config.json"
    return Fields(read_object(path, AGAIN), path)


def check_index(
    expected: dict[str, tuple[int, ...]], index: dict[str, TensorInfo], folder: Path, config: ModelConfig
) -> dict[str, TensorInfo]:
    """The same of an index that was read: its names are those of a folder of this config."""
    index = _with_packed(index, expected) if config.mxfp4 else index
    problems: defaultdict[str, list[str]] = defaultdict(list)
    if config.family in STACKED_FAMILIES and config.moe is not None:
        index = _one_by_one(index, expected, config.moe.num_experts, problems)
    elif config.vision is not None and config.moe is not None:
        index = unstacked(index, expected)
    problems["missing"] = sorted(set(expected) - set(index))
    further = predicting(index, config)
    problems["not in the config"] = sorted(
        set(index) - set(expected) - further - _unused(index, config) - _scales_of(expected, index)
    )
    found = {name: index[name] for name in expected if name in index}
    for name, info in found.items():
        if info.shape != expected[name]:
            problems["of another shape"].append(f"{name} is {list(info.shape)}, the config says {list(expected[name])}")
        elif info.packed is not None:
            problems["of another form"] += _unpackable(name, info.packed, expected[name])
        else:
            found[name] = _readable(name, index, config, problems)
    if config.fp8_block is not None and not any(info.dtype == FP8 for info in found.values()):
        problems["not quantised"].append(f"config.json has a quantization_config, and no tensor is {FP8}")
    if config.mxfp4 and not any(info.packed for info in found.values()):
        problems["not quantised"].append("config.json has a quantization_config, and no experts are MXFP4")
    readable_further(index, config, problems)
    if any(problems.values()):
        said = "; ".join(f"{kind}: {some(what)}" for kind, what in problems.items() if what)
        raise UserError(
            f"The weights in {folder} do not match its config.json. {said}. "
            "The folder mixes two models, or an export was cut short: export it again."
        )
    if config.tied_embeddings and HEAD in index and not are_same(index[HEAD], index[EMBEDDING]):
        raise untied(folder)
    return index | found


def _one_by_one(
    index: dict[str, TensorInfo], expected: dict[str, tuple[int, ...]], experts: int, problems: dict[str, list[str]]
) -> dict[str, TensorInfo]:
    """The same, with tensors of each expert in the place of one of all. problems: of another shape, it is added."""
    found = dict(index)
    for name, parts in stacked(expected).items():
        if name not in index or not index.keys().isdisjoint(parts):
            continue
        info = found.pop(name)
        rows, columns = sum(expected[part][0] for part in parts), expected[parts[0]][1]
        if info.shape != (experts, rows // experts, columns):
            wanted = [experts, rows // experts, columns]
            problems["of another shape"].append(f"{name} is {list(info.shape)}, the config says {wanted}")
        offset = info.offset
        for part in parts:
            found[part] = replace(info, shape=expected[part], offset=offset)
            offset += content_bytes(found[part])
    return found


def unstacked(index: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    """The same, with tensors of each expert in the place of one of all, where that has a shape which can be theirs.

    expected: name -> shape, of tensors of each expert. A tensor of all has a matrix for each: its own ones below each other, as
    transformers 5 writes them, or with rows and columns exchanged, as Qwen3-VL's are published.
    """
    found = dict(index)
    for name, parts in stacked(expected).items():
        info = index.get(name)
        if info is None or len(info.shape) != 3 or len(parts) % info.shape[0]:
            continue
        (rows, width), each = expected[parts[0]], len(parts) // info.shape[0]
        exchanged = info.shape[1:] != (each * rows, width)
        if exchanged and info.shape[1:] != (width, each * rows):
            continue
        del found[name]
        for number, part in enumerate(parts):
            expert, place = divmod(number, each)
            one = replace(info, shape=(rows, width))
            before = expert * each + (0 if exchanged else place)
            columns = Columns(place * rows, each * rows) if exchanged else None
            found[part] = replace(one, offset=info.offset + before * content_bytes(one), columns=columns)
    return found


def content_bytes(info: TensorInfo) -> int:
    """Of a tensor's content on disk."""
    return math.prod(info.shape) * BITS[info.dtype] // 8


def unquantised(info: TensorInfo) -> TensorInfo:
    """What an export has of a tensor: an FP8 one becomes bfloat16, as DeepSeek makes it."""
    return info if info.scales is None else replace(info, dtype="BF16", scales=None)


def untied(folder: Path) -> UserError:
    """Of a config that ties what the weights have apart: transformers ties the two only where they are the same."""
    return UserError(
        f"The weights in {folder} hold {HEAD}, which is not the same as {EMBEDDING}, and config.json ties the two "
        "(tie_word_embeddings, or the default of its family). Set tie_word_embeddings to false there, or remove "
        f"{HEAD} from the weights."
    )


def are_same(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors have the same shape, dtype and bytes; no more than a block of each is held. Raises UserError."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    left = content_bytes(one)
    try:
        with one.file.open("rb") as ours, other.file.open("rb") as theirs:
            ours.seek(one.offset)
            theirs.seek(other.offset)
            while left > 0:
                block = min(left, BLOCK_BYTES)
                if ours.read(block) != theirs.read(block):
                    return False
                left -= block
    except OSError as error:
        files = " or ".join(sorted({str(one.file), str(other.file)}))
        raise UserError(f"{files} cannot be read ({error.strerror or error}). {AGAIN}") from error
    return True


def readable_further(
    index: Mapping[str, TensorInfo], config: ModelConfig, problems: dict[str, list[str]]
) -> dict[str, TensorInfo]:
    """Of an index the layers that predict further tokens, FP8 tensors with their scales. problems: what is wrong is added."""
    names = predicting(index, config)
    wanted = names - {scale_name(name) for name in names if index[name].dtype == FP8}
    return {name: _readable(name, index, config, problems) for name in sorted(wanted)}


def _readable(
    name: str, index: Mapping[str, TensorInfo], config: ModelConfig, problems: dict[str, list[str]]
) -> TensorInfo:
    """A tensor that is not packed, of FP8 with its scales. problems: what stands against reading it is added."""
    info = index[name]
    if info.dtype == FP8 and config.fp8_block is not None:
        return _with_scales(name, index, config.fp8_block, problems)
    if info.dtype not in DTYPES:
        problems["of another type"].append(f"{name} is {info.dtype}, {_supported(info.dtype)}")
    return info


def _supported(dtype: str) -> str:
    if dtype == FP8:
        return "and config.json has no quantization_config that says how it is scaled"
    return f"supported are {', '.join(DTYPES)}"


def _with_scales(
    name: str, index: Mapping[str, TensorInfo], block: tuple[int, int], problems: dict[str, list[str]]
) -> TensorInfo:
    """An FP8 tensor with its scales. problems: what is wrong with them is added."""
    info, scales = index[name], index.get(scale_name(name))
    if scales is None:
        problems["without scales"].append(f"{name} is {FP8}, and there is no {scale_name(name)}")
        return info
    if len(info.shape) != 2:
        problems["of another type"].append(f"{name} is {FP8}, and {list(info.shape)} is no matrix that has blocks")
        return info
    wanted = tuple(-(-size // each) for size, each in zip(info.shape, block, strict=True))
    if scales.shape != wanted or scales.dtype not in SCALE_DTYPES:
        problems["of other scales"].append(
            f"{scale_name(name)} is {list(scales.shape)} {scales.dtype}; blocks of {block[0]} x {block[1]} want "
            f"{list(wanted)} {' or '.join(SCALE_DTYPES)}"
        )
    return replace(info, scales=Scales(scales, block))


def _with_packed(index: dict[str, TensorInfo], expected: dict[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    """The same, with each tensor that is there in MXFP4 under its own name, in the place of blocks and scales."""
    found = dict(index)
    for name, shape in expected.items():
        names = blocks_name(name), scales_name(name)
        if name not in index and index.keys() >= set(names):
            blocks, scales = (found.pop(each) for each in names)
            found[name] = replace(blocks, shape=shape, packed=Packed(blocks, scales))
    return found


def _unpackable(name: str, packed: Packed, shape: tuple[int, ...]) -> list[str]:
    """What stands against reading an MXFP4 tensor."""
    if shape[1] % GROUP:
        return [f"{name}: rows of {shape[1]} numbers, and MXFP4 has one power of two for each {GROUP} of them"]
    wanted = blocks_shape(shape)
    pairs = {blocks_name(name): (packed.blocks, wanted), scales_name(name): (packed.scales, wanted[:-1])}
    return [
        f"{each} is {list(info.shape)} {info.dtype}, the config wants {list(needed)} {STORED}"
        for each, (info, needed) in pairs.items()
        if (info.shape, info.dtype) != (needed, STORED)
    ]


def _scales_of(expected: dict[str, tuple[int, ...]], index: dict[str, TensorInfo]) -> set[str]:
    """The scales of FP8 tensors that the config asks for."""
    quantised = (name for name in expected if name in index and index[name].dtype == FP8)
    return {scale_name(name) for name in quantised}


def _unused(index: dict[str, TensorInfo], config: ModelConfig) -> set[str]:
    """Tensors that are neither needed nor a sign of another model; an export does not have them.

    A stored copy of a tied head, which is held against the embedding; and rotary frequencies, which the config gives.
    """
    unused = {name for name in index if name.endswith("rotary_emb.inv_freq")}
    return unused | ({HEAD} if config.tied_embeddings else set())
