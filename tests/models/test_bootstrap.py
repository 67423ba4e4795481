"""What happens before Megatron is imported."""

from __future__ import annotations

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


def test_devices_take_no_attention_that_plans_anew_for_each_length() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        prepare_megatron(replace(chosen(), has_device_memory=True))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
