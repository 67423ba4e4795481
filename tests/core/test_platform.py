"""Which devices a process may use, as CUDA names them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megarl.core.platform import CUDA_SHARED, cuda_device_count, get_platform, visible_cuda_devices


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("0,1", ["0", "1"]),
        ("3, 5", ["3", "5"]),
        ("GPU-8932f937", ["GPU-8932f937"]),
        ("", []),
        ("-1", []),
        ("2,", ["2"]),
        ("NoDevFiles", []),
    ],
)
def test_devices_are_named_as_the_environment_names_them(
    monkeypatch: pytest.MonkeyPatch, visible: str, found: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_cuda_devices() == found


@pytest.mark.parametrize(
    ("visible", "torch", "name"),
    [
        ("0", "2.13.0", "cuda"),
        ("0", "2.13.0+cu130", "cuda"),
        ("0", "2.13.0+cpu", "cpu"),  # as in the environment that `make setup` makes on any machine
        ("0", None, "cuda"),  # one that only submits
        ("", "2.13.0+cu130", "cpu"),
    ],
)
def test_by_itself_it_is_cuda_where_devices_and_torch_are(
    monkeypatch: pytest.MonkeyPatch, visible: str, torch: str | None, name: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("megarl.core.platform.installed", lambda _: torch)
    cuda_device_count.cache_clear()
    try:
        assert get_platform("auto").name == name
    finally:
        cuda_device_count.cache_clear()


def test_threads_wait_for_one_another_a_moment_without_sleeping() -> None:
    cpu = get_platform("cpu")
    assert int(cpu.env["GOMP_SPINCOUNT"]) > 0
    assert not any("GOMP_SPINCOUNT" in cpu.server_env(tp) for tp in (1, 2))
    assert get_platform("cuda").server_env(2) == {}


def test_what_ranks_and_servers_of_one_group_share_is_as_the_user_says_else_as_sglang_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in CUDA_SHARED:
        monkeypatch.delenv(name, raising=False)
    assert CUDA_SHARED.items() <= get_platform("cuda").env.items()
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert get_platform("cuda").env["NCCL_NVLS_ENABLE"] == "1" and get_platform("cuda").env["NCCL_CUMEM_ENABLE"] == "0"
    assert not CUDA_SHARED.keys() & get_platform("cpu").env.keys()


def test_what_servers_on_shared_devices_need_is_in_their_environment() -> None:
    """SGLang's ranks compare their free memory and refuse to start where it differs: it does beside a run's ranks."""
    assert all(get_platform(name).env["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0" for name in ("cpu", "cuda"))


def test_ranks_and_servers_compute_no_products_in_tf32_where_an_image_asks_for_it() -> None:
    """torch reads the variable as it loads."""
    code = "import torch; print(torch.get_float32_matmul_precision())"
    asked = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    for env, found in ((asked, "high"), ({**asked, **get_platform("cuda").env}, "highest")):
        told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
        assert told.stdout.split() == [found], told
