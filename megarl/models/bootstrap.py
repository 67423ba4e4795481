"""What has to happen before Megatron is imported, on either platform."""

from __future__ import annotations

import importlib

from megarl.core.platform import Platform


def prepare_megatron(platform: Platform) -> None:
    """Make megatron-core usable in this process; repeatable. Call it before any import of megatron."""
    if platform.adapts_megatron:
        from megarl.models import cpu_matmul, megatron_cpu

        megatron_cpu.install()
        cpu_matmul.install()
    if not platform.has_transformer_engine:
        # Left unbound without it, and read all the same by the routers of experts (megatron-core 0.16.1).
        moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        vars(moe_utils).setdefault("te_general_gemm", None)
    if not (platform.has_transformer_engine or platform.has_apex):
        from megarl.models import megatron_torch_adam

        megatron_torch_adam.install()
