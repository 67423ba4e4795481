"""What a role's update tells a user beside its metrics."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.process import ProcessFacts, ProcessSpec
from megarl.cluster.ranks import RankGroup
from megarl.cluster.roles import Batch, Role
from megarl.cluster.waits import Call, Worker
from megarl.core.layout import Layout
from megarl.recipe.run import Deadlines


class AtOnce:
    """A waiter of calls that have been answered already."""

    def wait(self, calls: list[Call], **_: Any) -> list[Any]:
        return [call.result for call in calls]


def rank(share: float, notes: list[str], asked: list[str]) -> Worker:
    """One whose update reports this share; what it has to say is said once."""

    def take_notes(role: str) -> list[str]:
        asked.append(role)
        said, notes[:] = list(notes), []
        return said

    def remote(function: Any) -> Any:
        return SimpleNamespace(remote=function)

    update = remote(lambda *_: {"actor/loss": 1.0, "actor/grad_share_max": share})
    spec: ProcessSpec = SimpleNamespace(name="rank 0")  # type: ignore[assignment]
    return Worker(SimpleNamespace(update=update, take_notes=remote(take_notes)), spec, ProcessFacts(0, "?"))


@pytest.mark.parametrize(("share", "told"), [(0.995, ["actor: x holds it all"]), (0.99, [])])
def test_a_parameter_that_holds_nearly_all_of_the_gradient_is_warned_of(
    share: float, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []
    workers = (rank(share, ["x holds it all"], asked), rank(share, ["never asked"], asked))
    group = RankGroup(workers, AtOnce())  # type: ignore[arg-type]
    role = Role("actor", group, Layout(world_size=2), Deadlines())
    batch = Batch(((), ()), (((),), ((),)), SimpleNamespace())  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, logger="megarl"):
        for _ in range(2):
            assert role.update(batch, {}).wait() == {"actor/loss": 1.0, "actor/grad_share_max": share}
    assert [record.getMessage() for record in caplog.records] == told
    assert asked == ["actor"] * 2 * len(told)
