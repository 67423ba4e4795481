"""Products by oneDNN: the same numbers as in float64, whatever the shapes and strides; taken on AMD with AVX-512 alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.models import cpu_matmul

SIZES = st.sampled_from([1, 3, 4, 64, 129, 400])
KINDS = st.sampled_from(["rows", "columns", "gaps"])


def matrix(rows: int, columns: int, kind: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "columns":
        return torch.randn(columns, rows, generator=generator).t()
    if kind == "gaps":
        return torch.randn(rows, 2 * columns, generator=generator)[:, ::2]
    return torch.randn(rows, columns, generator=generator)


@given(m=SIZES, k=SIZES, n=SIZES, left=KINDS, right=KINDS)
def test_a_product_is_that_of_float64(m, k, n, left, right):
    rows, weight = matrix(m, k, left, 1), matrix(k, n, right, 2)
    torch.testing.assert_close(
        cpu_matmul.mm(rows, weight).double(), rows.double() @ weight.double(), atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 1), (1, -2), (0, 1)])
@pytest.mark.parametrize("shape", [(256,), (128, 256), (1, 256), (1,), ()])
@pytest.mark.parametrize("rows", [2, 128])
def test_a_product_with_a_bias_is_torch_s(rows, shape, beta, alpha):
    shape = (rows, *shape[1:]) if len(shape) == 2 and shape[0] == 128 else shape
    bias, left, right = torch.randn(shape), matrix(rows, 64, "rows", 1), matrix(64, 256, "columns", 2)
    wanted = beta * bias + alpha * (left @ right)
    torch.testing.assert_close(
        cpu_matmul.addmm(bias, left, right, beta=beta, alpha=alpha), wanted, atol=1e-4, rtol=1e-5
    )


def test_what_is_multiplied_by_zero_is_not_read():
    left, right = torch.ones(128, 64), torch.ones(64, 256)
    found = cpu_matmul.addmm(torch.full((256,), float("nan")), left, right, beta=0)
    assert torch.equal(found, torch.full((128, 256), 64.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_other_dtypes_are_left_to_torch(dtype):
    ones = torch.ones(128, 128, dtype=dtype)
    found = cpu_matmul.mm(ones, ones)
    assert found.dtype == dtype
    assert torch.equal(found, torch.full((128, 128), 128, dtype=dtype))


@pytest.mark.parametrize("shape", [(0, 64, 256), (128, 0, 256), (128, 64, 0)])
def test_empty_matrices(shape):
    m, k, n = shape
    assert torch.equal(cpu_matmul.mm(torch.ones(m, k), torch.ones(k, n)), torch.zeros(m, n))


@pytest.mark.parametrize(
    ("vendor", "flags", "wanted"),
    [
        ("AuthenticAMD", "fpu avx2 avx512f avx512bw", True),
        ("AuthenticAMD", "fpu avx2", False),
        ("GenuineIntel", "fpu avx2 avx512f", False),
    ],
)
def test_the_kind_of_cpu_decides(vendor, flags, wanted):
    core = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n\n"
    assert cpu_matmul.prefers_onednn(core * 2) is wanted


def test_facts_that_say_nothing_choose_nothing():
    assert not cpu_matmul.prefers_onednn("")


SCRIPT = """
import warnings
warnings.simplefilter("error")
import torch
from pathlib import Path
from megarl.models import cpu_matmul
facts = Path("facts")
facts.write_text("vendor_id: AuthenticAMD\\nflags: avx512f\\n")
cpu_matmul.CPU_FACTS = facts
called = []
product = cpu_matmul._product
cpu_matmul._product = lambda *tensors: called.append(1) or product(*tensors)
assert cpu_matmul.install() is cpu_matmul.install() is not None
linear = torch.nn.Linear(256, 256)
rows = torch.randn(128, 256, requires_grad=True)
linear(rows).sum().backward()
assert len(called) == 3, called  # forward, and the gradients of both
assert torch.allclose(rows.grad, linear.weight.sum(0).expand(128, -1), atol=1e-4)
"""


def test_torch_takes_them_forward_and_backward(tmp_path):
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, check=True, timeout=120)


GROWTH = """
import random, sys
import torch
from pathlib import Path
from megarl.models import cpu_matmul
if sys.argv[1] == "few":
    cpu_matmul.keep_few_kernels(cpu_matmul.KERNELS_OF_A_RANK)
held = lambda: int(Path("/proc/self/statm").read_text().split()[1])
weight = torch.randn(1024, 64)
cpu_matmul._product(torch.randn(800, 64), weight.t(), None)
before = held()
for rows in random.Random(0).sample(range(400, 800), 300):
    cpu_matmul._product(torch.randn(rows, 64), weight.t(), None)
print(held() - before)
"""


def test_micro_batches_of_any_length_leave_less_where_few_kernels_are_kept():
    # Where this process has been made ready for Megatron, it was told to keep few.
    environment = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    few, every = (
        int(subprocess.check_output([sys.executable, "-c", GROWTH, kept], text=True, timeout=120, env=environment))
        for kept in ("few", "all")
    )
    assert few < 0.6 * every
