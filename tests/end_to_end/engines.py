"""A session of the real engines, without the command line, and one step of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.cluster.roles import Batch
from megarl.core.timing import PhaseTimer
from megarl.recipe.load import load_recipe
from megarl.recipe.schema import Recipe
from megarl.run.preflight import preflight
from megarl.run.session import TrainSession, train_session
from tests.end_to_end.harness import RECIPE


def recipe_of(inputs: Path, name: str, *overrides: str) -> Recipe:
    """The tests' recipe for two devices, under a name of its own."""
    path = inputs / f"{name}.yaml"
    path.write_text(RECIPE.format(folder=inputs))
    return load_recipe(path, [f"run.name={name}", "cluster.devices=2", *overrides], Recipe).recipe


@contextmanager
def started(recipe: Recipe) -> Iterator[TrainSession]:
    """A session whose servers have the weights, as version 1."""
    with train_session(recipe, preflight(recipe), PhaseTimer()) as session:
        session.sync.push(1)
        yield session


def one_step(session: TrainSession, step: int, version: int) -> tuple[Batch, dict[str, float]]:
    """Samples, and an update with them."""
    batch = session.rollout.next(step, version)
    actor, reference = session.roles["actor"], session.roles["reference"]
    asked = {"old_logprobs": actor.logprobs(batch), "ref_logprobs": reference.logprobs(batch)}
    columns = {name: pending.wait() for name, pending in asked.items()}
    columns |= session.rollout.advantages(batch, columns).columns
    return batch, actor.update(batch, columns).wait()
