"""Which reference models a profile takes on devices: they fit, SGLang has an attention for them, and every layout cuts them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.core.layout import Layout
from megarl.core.platform import get_platform
from megarl.models.layout_check import layout_problems
from megarl.placement.cluster import make_cluster
from megarl.placement.devices import DEVICES
from megarl.placement.memory import Role, role_bytes
from megarl.placement.space import one_layout
from megarl.profiling.command import DEVICE_TOKENS, cases, device_models
from megarl.profiling.reference_model import Size

PLATFORM = get_platform("cuda")
NARROWEST_HEAD = 64  # FlashInfer's prefill has no kernel for less (include/flashinfer/attention/prefill.cuh, IsInvalid)


def models(device: str, *, fused: bool = True, shares: bool = False) -> tuple[Size, Size]:
    return device_models(make_cluster(device, 1, 8), replace(PLATFORM, has_transformer_engine=fused), shares=shares)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("device", [name for name in DEVICES if name != "cpu"])
def test_every_device_of_the_table_has_room_for_an_update(device: str, fused: bool) -> None:
    cluster, kernels = make_cluster(device, 1, 8), replace(DEVICES[device].kernels, fused=fused)
    for size in models(device, fused=fused):
        for case in cases(1, DEVICE_TOKENS):
            choice = one_layout(Layout(), case.micro_tokens)
            held = role_bytes(size.config, choice, 2, Role(trained=True, head=True, sequence=DEVICE_TOKENS), kernels)
            assert float(held.state[0] + held.working[0]) <= cluster.usable_bytes


def test_a_larger_device_has_wider_models_and_one_with_a_server_room_for_it() -> None:
    assert models("H200")[1].hidden == models("H100")[1].hidden == 4096
    assert models("H100", fused=False)[1].hidden == 3072
    assert models("L4")[1].hidden == 1024
    alone, beside = (models("RTX-5090", fused=False, shares=shares)[1].hidden for shares in (False, True))
    assert alone > beside


def test_heads_are_as_wide_as_attentions_take_them_and_every_layout_cuts_them() -> None:
    narrow, wide = models("H200")
    layouts = {case.layout for count in (1, 2, 4, 8) for case in cases(count, DEVICE_TOKENS)}
    assert max(layout.tp for layout in layouts) == 2
    for size in (narrow, wide, *models("L4")):
        assert size.head_dim >= NARROWEST_HEAD
        assert [problem for layout in layouts for problem in layout_problems(size.config, layout)] == []
