"""The loop does what its names say, in this order, and hands on what it was given."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megarl.core.timing import PhaseTimer
from megarl.core.types import BatchInfo, EvalResult
from megarl.recipe.roles import Actor
from megarl.recipe.run import Model
from megarl.recipe.schema import Data, Eval, Recipe, Rollout, Train
from megarl.train import Cast, State, due, train


@dataclass
class Recorder:
    """Plays every part, and writes down what it is asked for."""

    name: str
    calls: list[Any]
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    stop_after: int = 99  # the step in which somebody asks

    @property
    def info(self) -> BatchInfo:
        return BatchInfo(0, 0, 2, 1, 1, 10, 10, {"reward/mean": 0.5})

    def generate(self, step: int, weight_version: int) -> Any:
        self.calls.append(("generate", step, weight_version))
        return self

    def advantages(self, batch: Any) -> tuple[str]:
        self.calls.append(("advantages",))
        return ("advantages",)

    def evaluate(self, step: int, weight_version: int) -> EvalResult:
        self.calls.append(("evaluate", step, weight_version))
        return EvalResult(1, 1, 1.0, 1.0, {"eval/accuracy": 1.0})

    def logprobs(self, batch: Any) -> tuple[str]:
        self.calls.append(("logprobs", self.name))
        return (self.name,)

    def update(self, batch: Any, **columns: Any) -> dict[str, float]:
        self.calls.append(("update", columns))
        return {"actor/loss": 1.0}

    def push(self, weight_version: int) -> dict[str, float]:
        self.calls.append(("push", weight_version))
        return {"sync/weight_version": weight_version}

    def save(self, state: State) -> None:
        self.calls.append(("save", state))

    def stopping(self) -> bool:
        return len(self.metrics) + 1 >= self.stop_after

    def record(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics[step] = metrics


def run(state: State, *, reference: bool, epochs: int = 1, stop_after: int = 99) -> tuple[list[Any], Recorder, State]:
    calls: list[Any] = []
    part = {
        name: Recorder(name, calls, stop_after=stop_after)
        for name in ("rollout", "actor", "reference", "sync", "keeper")
    }
    recipe = Recipe(
        model=Model(path=Path("m")),
        data=Data(train=Path("t"), eval=Path("e")),
        rollout=Rollout(prompts_per_step=1, samples_per_prompt=2, max_response_tokens=8),
        actor=Actor(epochs=epochs),
        eval=Eval(every=2),
        train=Train(steps=3, save_every=2),
    )
    cast = Cast(
        part["rollout"],
        part["actor"],
        part["reference"] if reference else None,
        part["sync"],
        part["keeper"],
        PhaseTimer(),
    )
    return calls, part["keeper"], train(cast, recipe, state)


def test_one_step_reads_like_the_algorithm() -> None:
    calls, keeper, end = run(State(2, 5), reference=True)
    columns = {"old_logprobs": ("actor",), "ref_logprobs": ("reference",), "advantages": ("advantages",)}
    assert calls == [
        ("generate", 3, 5),
        ("logprobs", "actor"),
        ("logprobs", "reference"),
        ("advantages",),
        ("update", columns),
        ("push", 6),
        ("evaluate", 3, 6),
        ("save", State(3, 6)),
    ]
    assert end == State(3, 6)
    assert {"reward/mean", "actor/loss", "sync/weight_version", "eval/accuracy", "perf/step_s"} <= set(
        keeper.metrics[3]
    )


def test_without_a_reference_nobody_asks_for_it_and_epochs_repeat_the_update() -> None:
    calls, keeper, end = run(State(), reference=False, epochs=2)
    assert ("logprobs", "reference") not in calls
    assert sum(call[0] == "update" for call in calls) == 6
    assert [call[1] for call in calls if call[0] == "push"] == [1, 2, 3]
    assert [call[1] for call in calls if call[0] == "evaluate"] == [2, 3]
    assert [call[1].step for call in calls if call[0] == "save"] == [2, 3]
    assert list(keeper.metrics) == [1, 2, 3] and end == State(3, 3)


def test_a_request_to_stop_commits_the_step_under_way_and_ends_the_loop() -> None:
    calls, keeper, end = run(State(), reference=False, stop_after=1)
    assert [call[1] for call in calls if call[0] == "save"] == [State(1, 1)]  # no multiple of save_every
    assert list(keeper.metrics) == [1] and end == State(1, 1)


@pytest.mark.parametrize(
    ("step", "every", "last", "expected"), [(4, 2, 9, True), (5, 2, 9, False), (9, 2, 9, True), (9, None, 9, True)]
)
def test_due(step: int, every: int | None, last: int, expected: bool) -> None:
    assert due(step, every, last) is expected
