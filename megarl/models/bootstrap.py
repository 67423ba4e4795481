"""What has to happen before Megatron is imported, on either platform."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from megarl.core.errors import MegarlError
from megarl.core.platform import Platform


def prepare_megatron(platform: Platform) -> None:
    """Make megatron-core usable in this process; repeatable. Call it before any import of megatron.

    Raises MegarlError where Transformer Engine is installed and does not load.
    """
    if platform.has_transformer_engine:
        _load_transformer_engine()
    else:
        _hide("transformer_engine")
    if not platform.has_apex:
        _hide("apex", "amp_C")
    if platform.adapts_megatron:
        from megarl.models import cpu_matmul, cpu_norm, megatron_cpu

        megatron_cpu.install()
        cpu_matmul.keep_few_kernels(cpu_matmul.KERNELS_OF_A_RANK)
        cpu_matmul.install()
        cpu_norm.install()
    if platform.has_device_memory:
        # From cuDNN 9.15 on torch takes its attention first, which makes a plan for each shape that it meets. Sequences have any
        # length: nearly every one would wait for three plans. Flash attention has none.
        torch = importlib.import_module("torch")
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Convolutions are TF32's unless somebody says otherwise, and in NVIDIA's images products are as well.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    if not platform.has_transformer_engine:
        # Left unbound without it, and read all the same by the routers of experts (megatron-core 0.16.1).
        moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        vars(moe_utils).setdefault("te_general_gemm", None)
    if not (platform.has_transformer_engine or platform.has_apex):
        from megarl.models import megatron_torch_adam

        megatron_torch_adam.install()


def _hide(*packages: str) -> None:
    """Let this process find that these are not installed, unless it has loaded them already.

    Megatron takes their optimizers and norms wherever it finds them: they compute on devices alone, and an Apex that was built
    without its kernels says so only when it is asked to compute.
    """
    modules: dict[str, Any] = sys.modules
    for package in packages:
        modules.setdefault(package, None)  # how Python writes down that there is none


def _load_transformer_engine() -> None:
    """Megatron would go on without it, and be asked for its layers; or pass on an error that says nothing of it."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # whatever its parts that are built on the machine raise
        raise MegarlError(
            f"Transformer Engine is installed and does not load: {type(error).__name__}: {error}. Build it against this torch "
            "(requirements/README.md says how), or uninstall it: Megatron's layers with torch's attention are used then."
        ) from error
