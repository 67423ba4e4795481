"""On which platform the tests run what computes: pytest's option --platform, cpu where nothing is said.

Tests take it from the fixture `platform`. It is an environment variable besides, for the processes of ranks that tests start.
"""

from __future__ import annotations

import importlib.util
import os

from megarl.core.platform import Platform, cuda_device_count, get_platform, num_local_devices

VARIABLE = "MEGARL_TEST_PLATFORM"
# What tests ask for that a machine with devices may lack, with the modules that it takes.
MODULES = {"ray": ("ray",), "SGLang": ("sglang", "sglang_router"), "SGLang's kernels": ("sgl_kernel",)}


def chosen() -> Platform:
    """The platform of this process's tests, or of the tests that started this process."""
    return get_platform(os.environ.get(VARIABLE, "cpu"))  # type: ignore[arg-type]


def trouble(platform: Platform) -> str | None:
    """Why nothing can be tried on this platform here; None where it can."""
    if not platform.has_device_memory:
        return None
    if not cuda_device_count():
        return "this machine shows no NVIDIA GPU (/dev/nvidia0, CUDA_VISIBLE_DEVICES)"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no device, though the machine shows one: is it a build for CUDA?"
    return None


def lacking(platform: Platform, needs: tuple[str, ...]) -> str | None:
    """What of these a machine with devices lacks, as words; None where all is there. Nothing may be lacking on a CPU."""
    if not platform.has_device_memory:
        return None
    missing = [need for need in needs if any(importlib.util.find_spec(module) is None for module in MODULES[need])]
    return f"needs {' and '.join(missing)}" if missing else None


def lacking_devices(platform: Platform, wanted: int) -> str | None:
    """Whether the ranks of a test have a device each, as words where not: NCCL takes no two ranks on one device."""
    found = num_local_devices(platform)
    return None if found is None or found >= wanted else f"needs {wanted} devices, and {found} is there"
