"""Memory of a role whose vision tower learns, predicted and as the engine holds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.core.layout import Layout
from megarl.models.hf_config import load_model_config
from megarl.placement.devices import DEVICES
from megarl.placement.memory import Role, Shown, role_bytes
from megarl.placement.space import one_layout
from megarl.recipe.roles import Optimizer
from tests.support import vision as tiny
from tests.support.live_bytes import LiveBytes
from tests.training.seeing import pictured, pictured_shards, seeing_spec

LARGER = {"depth": 4, "hidden_size": 128, "intermediate_size": 352}
LEARNS = Optimizer(lr=1e-4, freeze_vision_tower=False)
IMAGES, SIZE = 3, (4, 3)


@pytest.mark.parametrize("architecture", [tiny.QWEN2_5, tiny.QWEN3])
def test_predictions_hold_against_the_engine(
    architecture: tiny.Architecture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tower that is larger than its text part: its backward pass is the fullest moment."""
    from bench.support.training import one_rank

    name, text, tower = tiny.TINY[architecture]
    monkeypatch.setitem(tiny.TINY, architecture, (name, text, {**tower, **LARGER}))
    folder = tiny.write_tiny_vision_model(tmp_path / "model", architecture)
    config = load_model_config(folder)
    assert config.vision is not None
    made = [pictured(config.vision, [3, SIZE, 5], seed) for seed in range(IMAGES)]
    [shard] = pictured_shards(made, micro_batches=IMAGES)
    with one_rank() as rank, LiveBytes() as live:
        rank.build("actor", replace(seeing_spec(folder), optimizer=LEARNS))
        rank.update("actor", shard, {})
        live.reset()
        rank.update("actor", shard, {})
        held = rank.engine("actor")._offload.device_bytes()
        peak = live.peak
    shown = Shown(squares=SIZE[0] * SIZE[1], images=IMAGES, samples=IMAGES)
    tokens = len(made[0].example.tokens)
    choice = one_layout(Layout(), tokens)
    said = role_bytes(config, choice, 4, Role(trained=True, head=True, shown=shown), DEVICES["cpu"].kernels)
    state = held["params"] + held["grads"] + held["optimizer"]
    assert said.state[0] == pytest.approx(state, rel=0.01)
    assert said.state[0] + said.working[0] == pytest.approx(peak, rel=0.05)
    assert said.working[0] == pytest.approx(peak - state, rel=0.1)
