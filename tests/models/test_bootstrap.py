"""What happens before Megatron is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.core.errors import MegarlError
from megarl.models.bootstrap import prepare_megatron
from tests.support.platforms import chosen


@pytest.mark.host_only
@pytest.mark.parametrize(
    "trouble", ["ImportError('no transformer_engine_torch')", "FileNotFoundError('libtransformer_engine.so')"]
)
def test_transformer_engine_that_does_not_load_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Megatron passes over the one and does not load for the other."""
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(f"raise {trouble}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [each for each in sys.modules if each.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    name = trouble.partition("(")[0]
    with pytest.raises(MegarlError, match=f"Transformer Engine is installed and does not load: {name}: .*uninstall it"):
        prepare_megatron(replace(chosen(), has_transformer_engine=True))
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)


@pytest.mark.host_only
def test_what_computes_on_devices_alone_is_not_taken_where_it_is_installed(tmp_path: Path) -> None:
    """As by a conversion, and by a run with cluster.platform: cpu, in an environment that was made for GPUs."""
    packages = ("transformer_engine/pytorch/optimizers", "apex/optimizers")
    for package in packages:
        folder = tmp_path / package
        folder.mkdir(parents=True)
        folder.joinpath("__init__.py").write_text(
            "FusedAdam = FusedSGD = multi_tensor_applier = multi_tensor_l2norm = multi_tensor_scale = None\n"
        )
    # In a process of its own: in this one Megatron is loaded already.
    code = """
from megarl.core.platform import get_platform
from megarl.models.bootstrap import prepare_megatron

prepare_megatron(get_platform("cpu"))
from megatron.core import optimizer
from megatron.core.optimizer import clip_grads
assert optimizer.USING_PYTORCH_OPTIMIZER, optimizer.Adam
assert clip_grads.l2_norm_impl.__module__.startswith("megatron."), clip_grads.l2_norm_impl
"""
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": paths})


def test_devices_take_no_attention_that_plans_anew_for_each_length() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        prepare_megatron(replace(chosen(), has_device_memory=True))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_float32_on_devices_is_float32_whatever_the_environment_says() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("high")  # as torch loads under TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1
        torch.backends.cudnn.allow_tf32 = True
        prepare_megatron(replace(chosen(), has_device_memory=True))
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("highest", False)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
