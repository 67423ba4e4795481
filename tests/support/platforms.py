"""On which platform the tests run what computes: pytest's option --platform, cpu where nothing is said.

Tests take it from the fixture `platform`. It is an environment variable besides, for the processes of ranks that tests start.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from megarl.core.platform import Platform, cuda_device_count, get_platform, num_local_devices

VARIABLE = "MEGARL_TEST_PLATFORM"
# Set by --may-lack: what the machine has not takes its own tests away. Otherwise they fail.
MAY_LACK = "MEGARL_TEST_MAY_LACK"
# What tests ask for that a machine may lack, with the modules or programs that it takes; on devices, these as well.
MODULES = {"Ray": ("ray",), "SGLang": ("sglang", "sglang_router"), "py-spy": ("py-spy",)}
PROGRAMS = ("py-spy",)
ON_DEVICES = {"SGLang": ("sgl_kernel",)}


def chosen() -> Platform:
    """The platform of this process's tests, or of the tests that started this process."""
    return get_platform(os.environ.get(VARIABLE, "cpu"))  # type: ignore[arg-type]


def may_lack() -> bool:
    """Whether tests are skipped whose packages are not there."""
    return bool(os.environ.get(MAY_LACK))


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


def lacking(platform: Platform, *needs: str) -> str | None:
    """Which of these the machine lacks, as words; None where all is there, or nothing may be lacking."""
    missing = [need for need in needs if may_lack() and any(map(_absent, _modules(platform, need)))]
    return f"needs {' and '.join(missing)}" if missing else None


def _modules(platform: Platform, need: str) -> tuple[str, ...]:
    return MODULES[need] + (ON_DEVICES.get(need, ()) if platform.has_device_memory else ())


def _absent(name: str) -> bool:
    if name in PROGRAMS:
        return not Path(sys.executable).with_name(name).exists() and shutil.which(name) is None
    return importlib.util.find_spec(name) is None


def absent_import(error: BaseException | None) -> str | None:
    """The package of MODULES whose import failed in an error or what led to it, as words; None where it is something else."""
    modules = {module: need for need, names in (*MODULES.items(), *ON_DEVICES.items()) for module in names}
    while error is not None:
        name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if may_lack() and name in modules:
            return f"needs {modules[name]}"
        error = error.__cause__ or error.__context__
    return None


def lacking_devices(platform: Platform, wanted: int) -> str | None:
    """Whether the ranks of a test have a device each, as words where not: NCCL takes no two ranks on one device."""
    found = num_local_devices(platform)
    return None if found is None or found >= wanted else f"needs {wanted} devices"
