"""The tensors of an HF folder as the safetensors library itself reads them: what a conversion is held against.

Of megarl's own reader nothing is used but which tensors there are: neither its offsets nor its slices nor its way with FP8.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megarl.models.carried import carried
from megarl.models.config import ModelConfig
from megarl.models.hf_dtypes import ModelDtype, tensor_dtypes
from megarl.models.hf_files import EMBEDDING, HEAD, names_of_text, untied
from megarl.models.hf_fp8 import scale_name
from megarl.models.hf_mxfp4 import blocks_name, scales_name
from megarl.models.hf_stacked import stacked
from megarl.models.multimodal import TOWER, tower_names
from megarl.models.rules import expected_tensors
from megarl.models.weight_files import weight_files
from megarl.training.manifest import read_model_config

BLOCK_ROWS = 1024


def hf_tensors(folder: Path, cast: ModelDtype | None = None, *, tower: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Name and content of every tensor that the config asks for, in the order of a forward pass.

    cast: the dtype of a model that they are read for; None is each file's own, and bfloat16 for FP8 and MXFP4. tower: of a
    multimodal model also its vision tower, first. Raises UserError where the config ties a head to the embedding, and the files
    hold another.
    """
    config = read_model_config(folder)
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "pt")) for path in weight_files(folder)]
        holder = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (no mapping)
        if config.vision is not None:
            if tower:
                yield from _of_tower(holder, cast)
            yield from _of_text_part(holder, folder, cast)
            return
        if config.tied_embeddings and HEAD in holder and not _are_same(holder[HEAD], holder[EMBEDDING]):
            raise untied(folder)
        of_all = {
            part: (name, at)
            for name, parts in stacked(expected_tensors(config)).items()
            for at, part in enumerate(parts)
        }
        for name, dtype in tensor_dtypes(config, cast or "bfloat16", {}).items():
            if config.mxfp4 and name not in holder:
                packed = (holder[each].get_tensor(each) for each in (blocks_name(name), scales_name(name)))
                tensor = _unpacked(*packed)
                yield name, tensor.to(getattr(torch, dtype)) if cast else tensor
                continue
            if name not in holder and name in of_all:
                tensor = _of_all(holder, *of_all[name])
                yield name, tensor.to(getattr(torch, dtype)) if cast else tensor
                continue
            tensor = holder[name].get_tensor(name)
            is_fp8 = config.fp8_block is not None and tensor.dtype == torch.float8_e4m3fn
            if is_fp8:
                tensor = _unscaled(tensor, holder[scale_name(name)].get_tensor(scale_name(name)), config.fp8_block)
            yield name, tensor.to(getattr(torch, dtype)) if cast or is_fp8 else tensor


def carried_tensors(folder: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Name and content of every tensor that is carried along with the model, as exports have them."""
    for name, info in carried(folder, config).items():
        with ExitStack() as stack:
            held = stack.enter_context(safe_open(info.file, "pt"))
            tensor = held.get_tensor(name)
            if info.scales is not None:
                beside = stack.enter_context(safe_open(info.scales.info.file, "pt"))
                tensor = _unscaled(tensor, beside.get_tensor(scale_name(name)), info.scales.block).bfloat16()
            yield name, tensor


def _of_tower(holder: dict[str, Any], cast: ModelDtype | None) -> Iterator[tuple[str, Tensor]]:
    for part, name in tower_names(holder).items():
        tensor = holder[name].get_tensor(name)
        yield TOWER + part, tensor.to(getattr(torch, cast)) if cast else tensor


def _of_text_part(holder: dict[str, Any], folder: Path, cast: ModelDtype | None) -> Iterator[tuple[str, Tensor]]:
    """What `hf_tensors` gives of a multimodal folder."""
    names, config = names_of_text(holder, folder), read_model_config(folder)
    ours = {text: holder[name] for text, name in names.items()}
    expected = expected_tensors(config)
    of_all = {part: (name, at) for name, parts in stacked(expected).items() for at, part in enumerate(parts)}
    for name, dtype in tensor_dtypes(config, cast or "bfloat16", {}).items():
        if name in ours:
            tensor = ours[name].get_tensor(names[name])
        else:
            whole, at = of_all[name]
            tensor = _of_either_form(ours[whole].get_slice(names[whole]), at, expected[name])
        yield name, tensor.to(getattr(torch, dtype)) if cast else tensor


def _of_all(holder: dict[str, Any], name: str, at: int) -> Tensor:
    """The expert's own of a tensor of all experts. at: which, where an expert has a gate and an up, or one of them."""
    tensor, each = holder[name].get_slice(name), 2 if name.endswith("gate_up_proj") else 1
    rows = tensor.get_shape()[1] // each
    own: Tensor = tensor[at // each, at % each * rows : (at % each + 1) * rows]
    return own


def _of_either_form(whole: Any, at: int, shape: tuple[int, ...]) -> Tensor:
    """The same of a tensor of all experts that may have rows and columns exchanged. shape: of the expert's own."""
    of_expert, (rows, width) = whole.get_shape()[1:], shape
    each = of_expert[0] * of_expert[1] // (rows * width)
    part = slice(at % each * rows, (at % each + 1) * rows)
    if of_expert == [each * rows, width]:
        return whole[at // each, part]  # type: ignore[no-any-return]
    turned: Tensor = whole[at // each, :, part]
    return turned.T.contiguous()


def _are_same(heads: Any, embeddings: Any) -> bool:
    """Whether the head that one file holds is the embedding of another; some rows of each are read at a time."""
    head, embedding = heads.get_slice(HEAD), embeddings.get_slice(EMBEDDING)
    shape = embedding.get_shape()
    if (head.get_shape(), head.get_dtype()) != (shape, embedding.get_dtype()):
        return False
    firsts = range(0, shape[0], BLOCK_ROWS)
    return all(torch.equal(head[row : row + BLOCK_ROWS], embedding[row : row + BLOCK_ROWS]) for row in firsts)


def _unscaled(values: Tensor, scales: Any, block: Any) -> Tensor:
    """[rows, columns] float32: the scales repeated over their blocks, and cut to the values."""
    repeated = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    product: Tensor = values.float() * repeated[: values.shape[0], : values.shape[1]]
    return product


def _unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """[experts, in, out] bfloat16: of each four bits a sign, two of exponent and one of mantissa, times 2 ** (scale - 127)."""
    bits = torch.stack([blocks % 16, blocks // 16], -1).flatten(-2).int()
    exponent, mantissa = bits // 2 % 4, bits % 2
    # Without an exponent the mantissa is a half; else it adds a half to the one before it.
    value = torch.where(exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1))
    value = torch.where(bits >= 8, -value, value)
    powers = 2.0 ** (scales.double() - 127)
    return (value.double() * powers[..., None]).bfloat16().flatten(-2).transpose(1, 2).contiguous()
