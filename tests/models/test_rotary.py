"""Rotary modules: which tables they hold, and what they return."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch

from megarl.models.config import Mla, ModelConfig, Rope
from megarl.models.rope import inverse_frequencies
from megarl.models.rotary import ScaledRotary, make_rotary, scales_rotation
from tests.models.test_hf_config import parse

ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
YARN = Rope(1e4, "yarn", factor=4.0, original_positions=64)
LATENT = Mla(q_rank=None, kv_rank=8, nope_dim=8, rope_dim=4, v_dim=8)


def model(**changes: object) -> ModelConfig:
    return replace(parse(), head_dim=8, **changes)  # type: ignore[arg-type]


def test_an_angle_is_position_times_frequency(device: str) -> None:
    config = model(rope=Rope(100.0))
    angles = make_rotary(config, ALONE, device)(5, offset=2, packed_seq=True)
    assert angles.shape == (5, 1, 1, 8)
    frequencies = inverse_frequencies(config.rope, 8).to(device)
    torch.testing.assert_close(angles[3, 0, 0], 5 * torch.cat([frequencies, frequencies]))


def test_local_layers_have_a_table_of_their_own(device: str) -> None:
    config = model(rope=Rope(1e6, "linear", factor=8.0), local_rope=Rope(1e4))
    both = make_rotary(config, ALONE, device)(7)
    assert both.shape == (2, 7, 1, 1, 8)
    for table, rope in zip(both, (config.rope, config.local_rope), strict=True):
        assert rope is not None
        torch.testing.assert_close(table, make_rotary(model(rope=rope), ALONE, device)(7))


def test_a_context_rank_holds_the_first_and_the_last_chunk(device: str) -> None:
    config = model(rope=Rope(100.0))
    whole = make_rotary(config, ALONE, device)(8)
    half = make_rotary(config, SimpleNamespace(size=lambda: 2, rank=lambda: 1), device)
    torch.testing.assert_close(half(8), whole[[2, 3, 4, 5]])
    torch.testing.assert_close(half(8, packed_seq=True), whole)


def test_the_factor_goes_with_the_angles_where_a_part_of_the_head_is_rotated(device: str) -> None:
    whole_head, part = model(rope=YARN), model(rope=YARN, mla=LATENT)
    assert not scales_rotation(whole_head)
    assert not isinstance(make_rotary(whole_head, ALONE, device), ScaledRotary)
    assert scales_rotation(part)
    angles, factor = make_rotary(part, ALONE, device)(3)
    assert angles.shape == (3, 1, 1, 4)
    assert factor > 1.1
    assert not scales_rotation(model(rope=Rope(1e4), mla=LATENT))
