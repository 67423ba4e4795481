"""The end of a run as its samples see it: whoever plays episodes gives back what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.process import ProcessFacts, ProcessSpec
from megarl.cluster.samples import Samples
from megarl.cluster.waits import Call, Worker
from megarl.core.errors import WorkerDiedError
from tests.cluster.test_overlapping import RECIPE
from tests.support.fake_pool import FakeActor, FakeWaiter


class Dying(FakeWaiter):
    """Whose waits for collectors fail, where it is told so."""

    def __init__(self, dies: bool) -> None:
        super().__init__()
        self.dies = dies

    def wait(self, calls: Sequence[Call], **about: Any) -> list[Any]:
        if self.dies and "collector" in calls[0].worker.name:
            raise WorkerDiedError("collector 0 (pid 5 on h) died")
        return super().wait(calls, **about)


def workers(folder: Path) -> list[Worker]:
    """A coordinator, and two collectors."""
    names = ("coordinator", "collector 0", "collector 1")
    return [Worker(FakeActor(name), ProcessSpec(name, folder), ProcessFacts(5, "h")) for name in names]


@pytest.mark.parametrize("dies", [False, True])
def test_collectors_are_closed_and_what_goes_wrong_there_costs_no_run(
    tmp_path: Path, dies: bool, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator, *collectors = workers(tmp_path)
    pool: Any = SimpleNamespace(workers=collectors)
    Samples(coordinator, pool, Dying(dies), RECIPE, 1).close()  # type: ignore[arg-type]
    for each in (coordinator, *collectors):
        assert each.handle.calls("close") == [()]
    assert ("collector 0 (pid 5 on h) died" in caplog.text) == dies


@pytest.mark.parametrize(("agent", "ended", "told"), [(True, "", 1), (False, "", 0), (True, "the raylet has ended", 0)])
def test_what_plays_episodes_is_closed_where_a_life_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: bool, ended: str, told: int
) -> None:
    """After Ctrl-C or the death of a rank no environment under way was closed: containers of a user's stayed."""

    waiter: Any = FakeWaiter()
    waiter.nodes = SimpleNamespace(services=SimpleNamespace(ended=lambda: ended))
    monkeypatch.setattr("megarl.cluster.samples.ray.wait", lambda refs, **_: (refs, []))
    coordinator, *collectors = workers(tmp_path)
    pool: Any = SimpleNamespace(workers=collectors)
    recipe: Any = SimpleNamespace(agent=object() if agent else None)
    Samples(coordinator, pool, waiter, recipe, 1).leave()
    assert [len(each.handle.calls("close")) for each in (coordinator, *collectors)] == [told] * 3
