"""Which attention Transformer Engine's layers have, by device."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.core.platform import compute_capability, get_platform
from megarl.models.bootstrap import prepare_megatron
from megarl.models.hf_config import load_model_config
from tests.support.package_source import PackageSource
from tests.support.platforms import chosen
from tests.support.tiny import write_tiny_model

prepare_megatron(chosen())
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402

from megarl.models import layer_spec  # noqa: E402
from megarl.models.attention import CoreAttention  # noqa: E402

UTILS = "transformer_engine.pytorch.attention.dot_product_attention.utils"
A100, L40S, H100, B200, RTX_PRO = (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)
ALL, NONE = {A100, L40S, H100, B200, RTX_PRO}, set()
# Elements of a key and of a value; where cuDNN's attention takes packed sequences of them; where flash-attn's does.
WIDTHS = [
    (64, 64, {H100, B200}, ALL),
    (80, 80, {H100, B200}, ALL),
    (128, 128, {H100, B200}, ALL),
    (256, 256, {H100}, ALL),
    (192, 128, {H100, B200}, NONE),  # DeepSeek-V3
    (192, 160, NONE, NONE),
    (96, 64, {H100, B200}, NONE),
    (36, 36, NONE, NONE),
]


@pytest.mark.parametrize(("keys", "values", "cudnn", "flash"), WIDTHS)
def test_attention_of_packed_sequences_is_transformer_engines_where_it_has_a_kernel(
    keys: int, values: int, cudnn: set[tuple[int, int]], flash: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(is_installed=False)
    monkeypatch.setitem(sys.modules, UTILS, SimpleNamespace(FlashAttentionUtils=found))
    config: Any = SimpleNamespace(head_dim=keys, mla=None if keys == values else SimpleNamespace(v_dim=values))

    def where() -> set[tuple[int, int]]:
        has = set()
        for capability in ALL:
            monkeypatch.setattr(layer_spec, "compute_capability", lambda _, one=capability: one)
            has |= {capability} if layer_spec.attends_packed(config, chosen()) else NONE
        return has

    assert where() == cudnn
    found.is_installed = True
    assert where() == cudnn | flash
    monkeypatch.setattr(layer_spec, "compute_capability", lambda _: None)
    assert layer_spec.attends_packed(config, chosen()), "no device is there to ask"


def test_what_is_asked_of_transformer_engine_is_in_its_source() -> None:
    source = PackageSource("transformer-engine", "transformer_engine")
    definition = source.find(UTILS, "FlashAttentionUtils")
    assert definition is not None and source.mentions(definition, "is_installed")


def test_only_a_device_has_a_capability() -> None:
    assert compute_capability(get_platform("cpu")) is None


def test_layers_without_it_keep_the_rest_of_transformer_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_model_config(write_tiny_model(tmp_path, "qwen3"))
    extension = SimpleNamespace(TENorm=object)
    monkeypatch.setitem(sys.modules, "megatron.core.extensions.transformer_engine", extension)
    # Any spec that has a layer's places.
    monkeypatch.setattr(
        layer_spec, "get_gpt_layer_with_transformer_engine_spec", lambda **_: get_gpt_layer_local_spec()
    )
    platform, attentions = replace(get_platform("cuda"), has_transformer_engine=True), []
    for has in (True, False):
        monkeypatch.setattr(layer_spec, "attends_packed", lambda *_, answer=has: answer)
        spec = layer_spec.stage_spec(config, range(2), platform, torch.bfloat16, 1)
        assert spec.layer_norm is extension.TENorm
        attentions.append([layer.submodules.self_attention.submodules.core_attention for layer in spec.layer_specs])
    assert CoreAttention not in attentions[0] and attentions[1] == [CoreAttention] * 2
