"""A run that is killed and goes on is the run that was never killed, whatever its recipe; without processes (tests/support/dry).

That real processes, killed by real signals, go on to the bit is for tests/end_to_end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from megarl.report.history import METRICS_FILE
from megarl.serving.sampling import Sampling
from tests.recipe.key_cases import CONTEXTS
from tests.recipe.test_keys import Runs, runs_in
from tests.support.dry import answers
from tests.support.dry.actors import Rank

STEPS = ["train.steps=4", "train.save_every=1"]
# Those whose state, journal or order of requests differs. Which samples make up an asynchronous step is a matter of time,
# and where it is not written down yet, made anew.
RECIPES = (
    *("critic", "KL in the loss", "KL steered", "distilled", "distilled advantages", "dapo", "corrected", "masked"),
    *("own advantage", "adapters", "agent", "agent with tools", "agent by tokens", "harness", "tools and room"),
    *("experts on cuda", "held out", "over the disk", "few at a time", "sampled", "graders", "scored", "scored tokens"),
)
KILLED_IN = ("update", "send_weights", "save")


class _KilledError(Exception):
    """The end of the driver."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with runs_in(tmp_path_factory.mktemp("world")) as runs:
        yield runs


@pytest.mark.parametrize("at", range(len(RECIPES)), ids=lambda at: RECIPES[at])
def test_a_run_goes_on_as_if_nothing_had_been(runs: Runs, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [*(each for each in CONTEXTS["train"][RECIPES[at]] if not each.startswith("train.steps")), *STEPS]
    monkeypatch.setattr(answers.Client, "_drawn", _drawn)
    whole = learned(runs, overrides)
    _kill(monkeypatch, KILLED_IN[at % len(KILLED_IN)], call=3)
    with pytest.raises(_KilledError):
        learned(runs, overrides)
    assert learned(runs, overrides, resume=True) == whole
    assert len(whole) == 5


@pytest.mark.parametrize("command", ["sft", "rm", "dpo", "kto"])
def test_a_supervised_run_goes_on_as_if_nothing_had_been(
    runs: Runs, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rows that it would have taken, and their losses."""
    overrides = [*STEPS, "data.eval=null"]
    whole = learned(runs, overrides, command=command)
    _kill(monkeypatch, "save", call=3)
    with pytest.raises(_KilledError):
        learned(runs, overrides, command=command)
    assert learned(runs, overrides, command=command, resume=True) == whole
    assert list(whole) == [1, 2, 3, 4] and len({str(row) for row in whole.values()}) == 4


def _drawn(client: Any, ids: Any, sampling: Sampling) -> int:
    """What a server draws: by the request's own seed, and of the weights that it has."""
    assert sampling.seed is not None
    return sampling.seed % 1009 + 13 * int(client._book.version)


def _kill(patch: pytest.MonkeyPatch, method: str, *, call: int) -> None:
    """Have the driver end at this call of the first rank, once: in the second step or the third."""
    calls, plain = [0], getattr(Rank, method)

    def killed(self: Rank, *arguments: Any) -> Any:
        calls[0] += self._rank == 0
        if calls[0] == call:
            calls[0] += 1
            raise _KilledError
        return plain(self, *arguments)

    patch.setattr(Rank, method, killed)


def learned(runs: Runs, overrides: Sequence[str], *, command: str = "train", resume: bool = False) -> dict[str, Any]:
    """All metrics by step, but those that tell of time, and of syncs that nobody needed."""
    runs._run(command, overrides, resume=resume)
    [file] = (runs.root / "runs").rglob(METRICS_FILE)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["step"]: {name: value for name, value in row.items() if not untold(name)} for row in rows}


def untold(name: str) -> bool:
    """Whether a metric may differ: those of dropped groups are counted since the run or its resume began."""
    return name.startswith(("perf/", "time/", "memory/", "sync/", "rollout/dropped/")) or name.endswith("_s")
