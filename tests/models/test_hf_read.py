"""Slices of files that the safetensors library wrote: rows, columns, casts, blocks, and values that are no numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.models import hf_read
from megarl.models.hf_files import read_index
from megarl.models.hf_read import HfReader


def stored(folder: Path, **tensors: Tensor) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [((0, 9), None), ((2, 5), None), ((0, 9), (3, 7)), ((8, 9), (0, 1))])
def test_slices_are_those_of_the_tensor(
    dtype: torch.dtype, rows: tuple[int, int], columns: tuple[int, int] | None, device: str, tmp_path: Path
) -> None:
    tensor = torch.randn(9, 8).to(dtype)
    wanted = tensor[slice(*rows)] if columns is None else tensor[slice(*rows), slice(*columns)]
    target = torch.empty(wanted.shape, device=device)
    with HfReader(read_index(stored(tmp_path, a=tensor)), check_finite=True) as reader:
        reader.read("a", slice(*rows), slice(*columns) if columns else None, target)
        assert reader.finish() == []
    assert torch.equal(target.cpu(), wanted.float())


def test_a_tensor_of_many_blocks_is_read_whole(device: str, tmp_path: Path) -> None:
    tensor = torch.randn(3 * hf_read.BLOCK_BYTES // 400 + 7, 100)
    target = torch.empty_like(tensor, device=device)
    with HfReader(read_index(stored(tmp_path, a=tensor)), check_finite=True) as reader:
        reader.read("a", slice(0, len(tensor)), None, target)
        reader.finish()
    assert torch.equal(target.cpu(), tensor)


def test_a_tensor_may_begin_anywhere_in_the_file(tmp_path: Path) -> None:
    header = (
        b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},"b":{"dtype":"F32","shape":[5],"data_offsets":[2,22]}}'
    )
    values = torch.randn(5)
    content = len(header).to_bytes(8, "little") + header + b"\0\0" + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    target = torch.empty(5)
    with HfReader(read_index(tmp_path), check_finite=True) as reader:
        reader.read("b", slice(0, 5), None, target)
        reader.finish()
    assert torch.equal(target, values)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_no_numbers_are_noticed_in_the_slice_that_has_them(
    value: float, device: str, tmp_path: Path
) -> None:
    tensor = torch.zeros(6, 4)
    tensor[5, 1] = value
    index = read_index(stored(tmp_path, a=tensor))
    target = torch.empty(3, 4, device=device)
    with HfReader(index, check_finite=True) as reader:
        reader.read("a", slice(0, 3), None, target)
        assert reader.finish() == []
        reader.read("a", slice(3, 6), None, target)
        assert reader.finish() == ["a"]
    with HfReader(index, check_finite=False) as reader:
        reader.read("a", slice(3, 6), None, target)
        assert reader.finish() == []


def test_a_sum_that_overflows_is_no_infinite_value(device: str, tmp_path: Path) -> None:
    tensor = torch.full((64,), 60000.0, dtype=torch.float16)
    target = torch.empty_like(tensor, device=device)
    with HfReader(read_index(stored(tmp_path, a=tensor)), check_finite=True) as reader:
        reader.read("a", slice(0, 64), None, target)
        assert reader.finish() == []
    assert target.sum().isinf()


PEAK = """
import resource, sys
from pathlib import Path
import torch
from megarl.models.hf_files import read_index
from megarl.models.hf_read import HfReader
target = torch.zeros(96 * 2**18)  # touched now
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
with HfReader(read_index(Path(sys.argv[1])), check_finite=True) as reader:
    reader.read("a", slice(0, 2**18), None, target[: 2**18])
    reader.finish()
    before = peak()
    reader.read("a", slice(0, len(target)), None, target)
    reader.finish()
print(peak() - before)
"""


def test_what_was_read_does_not_stay_in_memory(tmp_path: Path) -> None:
    folder = stored(tmp_path, a=torch.zeros(96 * 2**18))
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder)], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) < 2 * hf_read.NUM_READERS * hf_read.BLOCK_BYTES, "96 MiB were read"
