"""A mixture of experts in the whole loop: experts assigned to two ranks, adapters beside them, routed by real servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.core.errors import SyncError
from megarl.core.timing import PhaseTimer
from megarl.recipe.load import load_recipe
from megarl.recipe.roles import ServerPart
from megarl.recipe.schema import Recipe
from megarl.run.preflight import preflight
from megarl.run.session import TrainSession, train_session
from megarl.serving.client import ServerClient
from megarl.serving.sampling import Sampling
from tests.end_to_end.engines import one_step
from tests.end_to_end.harness import RECIPE
from tests.support.tiny import write_tiny_model

pytestmark = pytest.mark.slow

PARTS: tuple[ServerPart, ...] = ("weights", "kv_cache")


@pytest.fixture(scope="module")
def recipe(inputs: Path) -> Recipe:
    write_tiny_model(inputs / "experts", "qwen3_moe", num_hidden_layers=1, mlp_only_layers=[])
    path = inputs / "experts.yaml"
    path.write_text(RECIPE.format(folder=inputs))
    overrides = [
        "run.name=experts",
        f"model.path={inputs / 'experts'}",
        "cluster.devices=2",
        "data.max_prompt_tokens=128",
        "actor.parallel.ep=2",
        "actor.aux_loss_coef=0.01",
        "sync.verify=hash",
        "actor.offload=[grads, params, optimizer]",
        "rollout.offload=[weights, kv_cache]",
    ]
    return load_recipe(path, overrides, Recipe).recipe


@pytest.fixture(scope="module")
def session(recipe: Recipe) -> Iterator[TrainSession]:
    """Two ranks that share the experts, and one server."""
    with train_session(recipe, preflight(recipe), PhaseTimer()) as session:
        session.sync.push(1)
        yield session


def test_experts_reach_the_servers_before_and_after_updates(session: TrainSession) -> None:
    for step, version in ((1, 1), (2, 2)):
        _, metrics = one_step(session, step, version)
        assert metrics["rollout/logprob_diff_max"] < 1e-4
        assert session.sync.push(version + 1)["sync/probe_diff_max"] < 1e-4


def test_servers_that_rested_answer_the_same(session: TrainSession) -> None:
    def answers() -> list[tuple[list[int], list[float]]]:
        async def ask() -> list[tuple[list[int], list[float]]]:
            async with ServerClient(servers.endpoint) as router:
                found = [await router.generate([10, 11, 12 + first], Sampling(12, 0.0)) for first in range(4)]
                return [(each.token_ids.tolist(), each.logprobs.tolist()) for each in found]

        return asyncio.run(ask())

    servers = session.rollout.servers
    servers.wake(PARTS, 30.0)
    before = answers()
    servers.sleep(PARTS, 30.0)
    with pytest.raises(SyncError, match="a weight sync comes first"):
        session.rollout.next(4, 3)
    session.sync.push(4)
    servers.wake(PARTS, 30.0)
    assert answers() == before


def test_every_expert_has_been_trained_and_is_exported(session: TrainSession, recipe: Recipe, tmp_path: Path) -> None:
    session.roles["actor"].export(recipe.model.path.resolve(), tmp_path / "hf")
    before = load_file(recipe.model.path / "model.safetensors")
    after = load_file(tmp_path / "hf" / "model.safetensors")
    assert after.keys() == before.keys()
    experts = [name for name in after if ".experts." in name]
    assert len(experts) == 8 * 3
    assert all(not torch.equal(after[name], before[name]) for name in experts)
