"""The CPU adapter's own pieces; that SGLang runs on them is tested with the real server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.core.stand_in import StandInModule
from megarl.serving import sglang_cpu, sglang_cpu_kernels
from megarl.serving.sglang_cpu_images import ImagesProcessor


def test_another_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.6.0")
    with pytest.raises(SystemExit, match=r"written for sglang 0.5.21 and found 0.6.0"):
        sglang_cpu.check_version()


def test_the_installed_sglang_is_the_one_it_was_written_for() -> None:
    sglang_cpu.check_version()


def test_triton_computes_what_sglang_computes_with_it() -> None:
    module = StandInModule("triton")
    sglang_cpu._triton_names(module)
    assert [module.cdiv(value, 4) for value in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [module.next_power_of_2(value) for value in (1, 2, 3, 17)] == [1, 2, 4, 32]


def test_new_cache_slots_go_to_the_rows_of_their_requests() -> None:
    table = torch.zeros(3, 5, dtype=torch.int32)
    sglang_cpu_kernels.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([3, 1]), torch.tensor([7, 8, 9]), 5
    )
    assert table.tolist() == [[9, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 7, 8, 0, 0]]


def test_a_shared_expert_is_added_as_far_as_its_gate_is_open() -> None:
    hidden, gate = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([3.0, -1.0])  # products 1 and 1
    shared, output = torch.tensor([[10.0, 20.0], [0.0, 1.0]]), torch.tensor([[1.0, 1.0], [5.0, 5.0]])
    sglang_cpu_kernels.gate_and_add(hidden, gate, shared, output)
    open_by = 1 / (1 + 2.718281828459045**-1)
    torch.testing.assert_close(output, torch.tensor([[1 + 10 * open_by, 1 + 20 * open_by], [5.0, 5 + open_by]]))
    narrow = torch.zeros(1, 2, dtype=torch.bfloat16)
    sglang_cpu_kernels.gate_and_add(hidden[:1].bfloat16(), gate.bfloat16(), shared[:1].bfloat16(), narrow)
    assert torch.equal(narrow, (shared[:1] * open_by).bfloat16())


def test_a_function_is_compiled_when_it_is_called_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def at_once(function: Any, **options: object) -> Callable[[int], int]:
        compiled.append(f"{getattr(function, '__name__', type(function).__name__)} {options}")
        return lambda value: 10 * function(value)

    monkeypatch.setattr(torch, "compile", at_once)
    sglang_cpu.compile_late()

    @torch.compile(dynamic=True)
    def more(value: int) -> int:
        return value + 1

    plain = torch.compile(more)
    assert compiled == [] and more.__name__ == "more"
    assert [more(1), more(2)] == [20, 30] and compiled == ["more {'dynamic': True}"]
    assert plain(1) == 200 and torch.compile(torch.nn.Identity()) is not None
    assert compiled[1:] == ["more {}", "Identity {}"]

    def biased_grouped_topk_impl(value: int) -> int:
        return value

    assert torch.compile(dynamic=True)(biased_grouped_topk_impl)(7) == 7
    monkeypatch.setenv(sglang_cpu.DISABLE, "1")
    assert torch.compile(dynamic=True)(len) is len and compiled[3:] == []


def murmur(blocks: list[int]) -> int:
    """MurmurHash3_x86_32 of whole blocks with seed 0, after the published algorithm, in plain Python."""
    state = 0
    for block in blocks:
        block = block * 0xCC9E2D51 % 2**32
        block = (block << 15 | block >> 17) % 2**32 * 0x1B873593 % 2**32
        state ^= block
        state = ((state << 13 | state >> 19) * 5 + 0xE6546B64) % 2**32
    state ^= 4 * len(blocks)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state = (state ^ state >> shift) * factor % 2**32
    return state


def test_seeded_numbers_are_murmur_hashes_of_seed_position_and_column() -> None:
    # Published: of the four bytes of 0x87654321, and of none.
    assert (murmur([0x87654321]), murmur([])) == (0xF55B516B, 0)
    seeds, positions = [0, 1, 2**63 - 1, 0x123456789ABCDEF0], [0, 5, 2**31 - 1, 77]
    sglang_cpu_kernels.register_operators()
    found = torch.ops.sgl_kernel.murmur_hash32_cpu.default(
        torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.arange(100)
    )
    assert found.shape == (4, 100)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for column in range(100):
            assert int(found[row, column]) == murmur([seed % 2**32, seed >> 32, position, column])


def test_what_shows_more_than_images_is_refused_by_its_name() -> None:
    with pytest.raises(NotImplementedError, match="there are no videos, and --mm-preprocess-cache-size-mb is over 0"):
        ImagesProcessor(None, None)(text="", images=[])


def test_a_kernel_without_a_stand_in_says_its_name_when_called() -> None:
    kernel = sglang_cpu_kernels.moe_align_block_size
    with pytest.raises(NotImplementedError, match="moe_align_block_size"):
        kernel()
    with pytest.raises(AttributeError):
        assert sglang_cpu_kernels.__wrapped__


def test_memory_of_a_bucket_stays_mapped_until_another_piece_comes(tmp_path: Path) -> None:
    """In a process of its own, because torch's function is replaced there."""
    code = f"""
from pathlib import Path
from megarl.serving import sglang_cpu
from megarl.sync.segments import Segment
from torch.multiprocessing import reductions
import torch
sglang_cpu.keep_mapped()
first, second = (Segment.make(1 << 16, Path({str(tmp_path / "registry")!r})) for _ in range(2))
first.flat.fill_(7)
def receive(segment):
    segment._storage._shared_incref()
    storage = reductions.rebuild_storage_filename(torch.UntypedStorage, *segment.handle)
    return storage.data_ptr(), storage[5]
def mappings(segment):
    return Path("/proc/self/maps").read_text().count(segment.path.name)
print([receive(first) == receive(first), mappings(first)])
print([receive(second)[1], mappings(first), mappings(second)])
first.close(); second.close()
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    # Of each piece one mapping is its maker's.
    assert told.stdout.splitlines() == ["[True, 2]", "[0, 1, 2]"]


def test_what_asks_for_cuda_of_torch_is_answered() -> None:
    asks = """
import torch
from megarl.serving import sglang_cpu

sglang_cpu._finish_kernels()
sglang_cpu._forget_pinning()
torch.cuda.synchronize()
torch.cuda.synchronize("cpu")
assert torch.tensor([1, 2], dtype=torch.int32, pin_memory=True).tolist() == [1, 2]
assert torch.zeros((2, 3), pin_memory=True, device="cpu").shape == torch.empty((2, 3), pin_memory=True).shape == (2, 3)
kept = torch.ones(2)
assert kept.pin_memory() is kept
"""
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
