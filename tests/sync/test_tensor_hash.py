"""Hashes of tensors are SGLang's own, in however many parts the bytes come."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.core.platform import TensorHash
from megarl.sync.tensor_hash import Tiles, flat_bytes, make_hash
from tests.support.platforms import chosen

LOW32, LOW64 = 2**32 - 1, 2**64 - 1

# What SGLang 0.5.21's own kernel (gpu_tensor_hash.py) gave under Triton 3.9's interpreter, for numbers of torch's generator.
BY_THE_KERNEL: list[tuple[tuple[int, ...], torch.dtype, str]] = [
    ((3,), torch.bfloat16, "cd45e576b5cf2164"),
    ((1,), torch.float32, "2621788636a63354"),
    ((100,), torch.float32, "d313c0dc79a5ab94"),
    ((8192,), torch.float32, "e9211cfb8495114c"),
    ((8193,), torch.float32, "10b7d668e9415f23"),
    ((130, 257), torch.bfloat16, "02dabe65d8e96eeb"),
    ((50001,), torch.bfloat16, "b9ca63cd847e145a"),
]


def flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def digest(name: TensorHash, data: Tensor, size: int) -> str:
    hashing = make_hash(name)
    for part in data.split(size):
        hashing.update(part.to(chosen().device))
    return hashing.hexdigest()


@pytest.fixture(scope="module")
def numbers() -> list[Tensor]:
    """The tensors of BY_THE_KERNEL, one after the other from the same generator."""
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape, dtype, _ in BY_THE_KERNEL]


@pytest.mark.parametrize("size", [7777, 2**20])
def test_tiles_are_the_kernels(numbers: list[Tensor], size: int) -> None:
    assert [digest("tiles", flat(tensor), size) for tensor in numbers] == [found for _, _, found in BY_THE_KERNEL]


def mixed(word: int) -> int:
    word = ((word ^ word >> 16) * 0x85EBCA6B) & LOW32
    word = ((word ^ word >> 13) * 0xC2B2AE35) & LOW32
    return word ^ word >> 16


def slow_tiles(data: bytes) -> str:
    """The kernel word by word, in Python's own numbers."""
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    seeds = 0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & LOW32
    total = 0
    for start in range(0, len(words), 8192):
        halves = []
        for seed, place, bits in zip(seeds, (0x27D4EB2D, 0x165667B1), (15, 13), strict=True):
            found = 0
            for at, word in enumerate(words[start : start + 8192], start):
                turned = (at << bits | at >> (32 - bits)) & LOW32
                found = (found + mixed(word ^ ((at * place + seed & LOW32) ^ turned))) & LOW32
            halves.append(mixed(found ^ (len(data) & LOW32)))
        total = (total + (halves[0] << 32 | halves[1])) & LOW64
    total = (total ^ total >> 30) * 0xBF58476D1CE4E5B9 & LOW64
    total = (total ^ total >> 27) * 0x94D049BB133111EB & LOW64
    return f"{total ^ total >> 31:016x}"


@given(st.binary(min_size=1, max_size=100), st.integers(1, 100))
def test_tiles_equal_the_sum_word_by_word(data: bytes, size: int) -> None:
    assert digest("tiles", torch.frombuffer(bytearray(data), dtype=torch.uint8), size) == slow_tiles(data)


@given(st.binary(min_size=1, max_size=100), st.integers(1, 100))
def test_sha256_is_its_first_64_bits(data: bytes, size: int) -> None:
    expected = hashlib.sha256(data).hexdigest()[:16]
    assert digest("sha256", torch.frombuffer(bytearray(data), dtype=torch.uint8), size) == expected


def test_one_bit_and_one_place_make_another_hash() -> None:
    zeros = torch.zeros(40000, dtype=torch.uint8)
    first, last = zeros.clone(), zeros.clone()
    first[0], last[-1] = 1, 1
    for name in ("tiles", "sha256"):
        assert len({digest(name, data, 4096) for data in (zeros, first, last, zeros[:-4])}) == 4  # type: ignore[arg-type]
    assert Tiles().hexdigest() == "0" * 16


def test_bytes_come_in_the_order_of_rows_whatever_the_memory() -> None:
    wide = torch.arange(24.0).reshape(4, 6)
    part = wide[1:, 2:5]
    assert torch.cat(list(flat_bytes(part))).equal(flat(part.contiguous()))
    assert torch.cat(list(flat_bytes(wide.T))).equal(flat(wide.T.contiguous()))


@pytest.mark.host_only  # a device's bytes are copied to the host
@pytest.mark.parametrize("name", ["sha256", "tiles"])
def test_a_role_can_free_what_was_hashed(name: TensorHash) -> None:
    weight = torch.arange(64.0)
    make_hash(name).update(flat(weight))
    weight.untyped_storage().resize_(0)
