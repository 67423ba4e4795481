"""Run by `alone.py`: on Blackwell a server that waits for weights in FP8 computes by kernels that leave their scales alone."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from megarl.serving.launcher import keep_scales
from megarl.serving.server import FEWER_KERNELS

VARIABLE = "SGLANG_ENABLE_JIT_DEEPGEMM"


def main() -> None:
    """Raises AssertionError where SGLang takes DeepGEMM."""
    platform: Any = import_module("sglang.srt.runtime_context")
    utils: Any = import_module("sglang.srt.layers.quantization.fp8_utils")
    deep_gemm: Any = import_module("sglang.srt.layers.deep_gemm_wrapper.configurer")
    environ: Any = import_module("sglang.srt.environ")
    os.environ.pop(VARIABLE, None)
    for load_format, kind, is_kept in (("auto", True, False), ("dummy", False, False), ("dummy", True, True)):
        with platform.override_platform(is_blackwell=kind, has_flashinfer=True):
            keep_scales(load_format)
            assert environ.envs.SGLANG_ENABLE_JIT_DEEPGEMM.get() is not is_kept, (load_format, kind)
    assert environ.envs.SGLANG_JIT_DEEPGEMM_FAST_WARMUP.name == FEWER_KERNELS
    # What DeepGEMM's kernels alone ask for is done where it is switched on.
    assert deep_gemm._compute_enable_deep_gemm() is False
    utils.is_flashinfer_available = lambda: True
    with platform.override_platform(is_blackwell=True):
        for is_on, kernel in ((True, "deepgemm_w8a8_block_fp8"), (False, "flashinfer_gemm_w8a8_block_fp8")):
            utils.deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = is_on
            assert utils._dispatch_auto_backend().__name__.startswith(kernel), is_on
