"""A run whose adapters go to the servers alone: rollout and trainer agree, and few bytes travel."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.recipe.schema import Recipe
from megarl.run.sending import ADAPTERS
from megarl.run.session import TrainSession
from tests.end_to_end.engines import one_step, recipe_of, started

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe(inputs: Path) -> Recipe:
    lora = "actor.lora={rank: 4, targets: [linear_qkv, linear_proj, linear_fc1, linear_fc2]}"
    overrides = ["actor.parallel.tp=2", "sync.lora=adapters", lora, "actor.optimizer.lr=1.0e-2"]
    return recipe_of(inputs, "adapters", *overrides)


@pytest.fixture(scope="module")
def session(recipe: Recipe) -> Iterator[TrainSession]:
    """Two tensor-parallel ranks, and a server."""
    with started(recipe) as session:
        yield session


def test_what_servers_sample_with_adapters_is_what_the_trainer_scores(session: TrainSession, recipe: Recipe) -> None:
    whole = sum(file.stat().st_size for file in recipe.model.path.glob("*.safetensors"))
    for step, version in ((1, 1), (2, 2), (3, 3)):
        batch, metrics = one_step(session, step, version)
        assert batch.info.weight_version == version and batch.info.metrics["rollout/failed"] == 0
        assert metrics["rollout/logprob_diff_max"] < 1e-4 and metrics["actor/grad_norm"] > 0
        sync = session.sync.push(version + 1)
        assert sync["sync/probe_diff_max"] < 1e-4 and 0 < sync["sync/bytes"] < whole / 2
        assert [each.name for each in (recipe.run.folder / ADAPTERS).iterdir()] == [f"version-{version + 1}"]
    # The actor has moved away from its reference, which is the model without adapters.
    assert metrics["actor/kl_loss"] > 1e-6


def test_a_server_that_comes_back_gets_the_adapters_again(session: TrainSession) -> None:
    [server] = session.rollout.servers.servers
    os.kill(server.pid, signal.SIGKILL)
    sync = session.sync.push(10)
    assert sync["sync/servers"] == 1 and sync["sync/probe_diff_max"] < 1e-4
    batch, metrics = one_step(session, 10, 10)
    assert batch.info.metrics["rollout/failed"] == 0 and metrics["rollout/logprob_diff_max"] < 1e-4
