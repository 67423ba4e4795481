"""The loop does what its names say, in this order, and hands on what it was given."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megarl.core.timing import PhaseTimer
from megarl.core.types import BatchInfo, EvalResult
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.roles import Actor, Critic, Reference
from megarl.recipe.run import Model
from megarl.recipe.schema import Data, Eval, Recipe, Rollout, Train
from megarl.train import Handles, State, due, train

ROLES = ("actor", "reference", "critic", "reward_model", "teacher")


@dataclass(frozen=True)
class Learnable:
    """What the rollout makes of the columns."""

    columns: dict[str, Any]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Pending:
    """What has begun; waited for later."""

    name: str
    calls: list[Any]
    result: Any

    def wait(self) -> Any:
        self.calls.append(("wait", self.name))
        return self.result


@dataclass
class Recorder:
    """Plays every part, and writes down what it is asked for."""

    name: str
    calls: list[Any]
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    stop_after: int = 99  # the step in which somebody asks
    failures: list[str] = field(default_factory=list)
    generated: list[str] = field(default_factory=list)  # what is said of the samples of each step

    @property
    def info(self) -> BatchInfo:
        return BatchInfo(0, 0, 2, 1, 1, 10, 10, {"reward/mean": 0.5}, self.generated[-1])

    def generate(self, step: int, weight_version: int) -> Any:
        self.calls.append(("generate", step, weight_version))
        self.generated.append("" if step == 2 else f"generated at {step}")
        return self

    def advantages(self, batch: Any, columns: dict[str, Any]) -> Learnable:
        self.calls.append(("advantages", dict(columns)))
        return Learnable({"advantages": ("advantages",), "returns": ("returns",)}, {"reward/kl": 0.25})

    def evaluate(self, step: int, weight_version: int) -> EvalResult:
        self.calls.append(("evaluate", step, weight_version))
        return EvalResult(1, 1, 1.0, 1.0, {"eval/accuracy": 1.0}, f"evaluated at {step}")

    def logprobs(self, batch: Any) -> Pending:
        self.calls.append(("logprobs", self.name))
        return Pending(self.name, self.calls, (self.name,))

    def values(self, batch: Any) -> Pending:
        self.calls.append(("values", self.name))
        return Pending(self.name, self.calls, (self.name,))

    def update(self, batch: Any, columns: dict[str, Any]) -> Pending:
        self.calls.append(("update", self.name, dict(columns)))
        return Pending(self.name, self.calls, {f"{self.name}/loss": 1.0})

    def copy_from(self, other: Any) -> None:
        self.calls.append(("copy", self.name, other.name))

    def push(self, weight_version: int) -> dict[str, float]:
        self.calls.append(("push", weight_version))
        return {"sync/weight_version": weight_version}

    def save(self, state: State) -> None:
        self.calls.append(("save", state))

    def stopping(self) -> bool:
        return len(self.metrics) + 1 >= self.stop_after

    def record(self, step: int, metrics: dict[str, float], failure: str = "") -> None:
        self.calls.append(("record", step))
        self.metrics[step] = metrics
        self.failures.append(failure)


def run(
    state: State, *roles: str, stop_after: int = 99, critic_has_own_devices: bool = False, **sections: Any
) -> tuple[list[Any], Recorder, State]:
    """The loop over 3 steps with the actor and these roles."""
    calls: list[Any] = []
    part = {name: Recorder(name, calls, stop_after=stop_after) for name in ("rollout", "sync", "recorder", *ROLES)}
    recipe = Recipe(
        model=Model(path=Path("m")),
        data=Data(train=Path("t"), eval=Path("e")),
        rollout=Rollout(prompts_per_step=1, samples_per_prompt=2, max_response_tokens=8),
        eval=Eval(every=2),
        train=Train(steps=3, save_every=2),
        **sections,
    )
    there = {name: part[name] if name in ("actor", *roles) else None for name in ROLES}
    handles = Handles(
        part["rollout"],  # type: ignore[arg-type]
        **there,  # type: ignore[arg-type]
        sync=part["sync"],
        recorder=part["recorder"],
        timer=PhaseTimer(),
        critic_has_own_devices=critic_has_own_devices,
    )
    return calls, part["recorder"], train(handles, recipe, state)


def test_samples_that_failed_are_recorded_with_the_step_that_they_are_of() -> None:
    for apart in (False, True):
        _, keeper, _ = run(State(weight_version=1), "critic", critic_has_own_devices=apart, critic=Critic())
        assert keeper.failures == ["generated at 1", "evaluated at 2", "generated at 3"], apart


def test_one_step_reads_like_the_algorithm() -> None:
    calls, recorder, end = run(State(2, 5), "reference")
    scored = {"old_logprobs": ("actor",), "ref_logprobs": ("reference",)}
    assert calls == [
        ("generate", 3, 5),
        ("logprobs", "actor"),
        ("logprobs", "reference"),
        ("wait", "actor"),
        ("wait", "reference"),
        ("advantages", scored),
        ("update", "actor", {**scored, "advantages": ("advantages",), "returns": ("returns",)}),
        ("wait", "actor"),
        ("push", 6),
        ("evaluate", 3, 6),
        ("save", State(3, 6)),
        ("record", 3),
    ]
    assert end == State(3, 6)
    wanted = {"reward/mean", "reward/kl", "actor/loss", "sync/weight_version", "eval/accuracy", "perf/step_s"}
    assert wanted <= set(recorder.metrics[3])


def test_a_step_of_ppo_asks_every_role_and_updates_the_critic_first() -> None:
    calls, recorder, _ = run(State(2, 5), "critic", "reward_model", "teacher", critic=Critic(epochs=2))
    scored = {
        "old_logprobs": ("actor",),
        "teacher_logprobs": ("teacher",),
        "values": ("critic",),
        "scores": ("reward_model",),
    }
    learned = {**scored, "advantages": ("advantages",), "returns": ("returns",)}
    # Everybody is asked before anybody is waited for: roles of different pools work at the same time.
    assert calls[1:16] == [
        ("logprobs", "actor"),
        ("logprobs", "teacher"),
        ("values", "critic"),
        ("values", "reward_model"),
        *(("wait", name) for name in ("actor", "teacher", "critic", "reward_model")),
        ("advantages", scored),
        ("update", "critic", learned),
        ("update", "critic", learned),
        ("update", "actor", learned),
        *(("wait", name) for name in ("critic", "critic", "actor")),
    ]
    assert {"critic/loss", "actor/loss"} <= set(recorder.metrics[3])


def test_a_critic_on_devices_of_its_own_learns_while_the_next_step_is_generated() -> None:
    calls, recorder, end = run(State(), "critic", critic_has_own_devices=True, critic=Critic())
    order = [
        call[:2] for call in calls if call[0] in ("generate", "update", "wait", "push", "save", "record", "values")
    ]
    scores = [("values", "critic"), ("wait", "actor"), ("wait", "critic")]
    learns = [("update", "critic"), ("update", "actor"), ("wait", "actor")]
    # Step 1 is recorded once its critic has learned; steps 2 and 3 are saved, and so nothing of them may be under way.
    assert order == [
        *(("generate", 1), *scores, *learns, ("push", 1)),
        *(("generate", 2), ("wait", "critic"), ("record", 1), *scores, *learns, ("push", 2)),
        *(("wait", "critic"), ("save", State(2, 2)), ("record", 2)),
        *(("generate", 3), *scores, *learns, ("push", 3), ("wait", "critic"), ("save", State(3, 3)), ("record", 3)),
    ]
    together, alike, _ = run(State(), "critic", critic=Critic())
    assert [call for call in calls if call[0] == "update"] == [call for call in together if call[0] == "update"]
    for step in (1, 2, 3):
        ours, theirs = (
            {name: value for name, value in kept.metrics[step].items() if not name.startswith("perf/")}
            for kept in (recorder, alike)
        )
        assert ours == theirs and "critic/loss" in ours
    assert end == State(3, 3)


def test_a_request_to_stop_waits_for_a_critic_apart() -> None:
    calls, recorder, _ = run(State(), "critic", stop_after=1, critic_has_own_devices=True, critic=Critic())
    assert [call[:2] for call in calls[-3:]] == [("wait", "critic"), ("save", State(1, 1)), ("record", 1)]
    assert "critic/loss" in recorder.metrics[1]


def test_the_actor_stands_still_while_the_critic_warms_up() -> None:
    calls, recorder, _ = run(State(), "critic", critic=Critic(warmup_steps=2))
    assert [call[1] for call in calls if call[0] == "update"] == ["critic", "critic", "critic", "actor"]
    assert "actor/loss" not in recorder.metrics[2] and "actor/loss" in recorder.metrics[3]


def test_the_rollouts_own_log_probs_save_a_forward_pass() -> None:
    calls, _, _ = run(State(), algorithm=Algorithm(old_logprobs="rollout"))
    assert not [call for call in calls if call[0] == "logprobs"]


def test_the_reference_becomes_the_actor_every_so_many_steps() -> None:
    calls, _, _ = run(State(), "reference", reference=Reference(refresh_every=2))
    assert [index for index, call in enumerate(calls) if call == ("copy", "reference", "actor")]
    pushes = [call for call in calls if call[0] in ("push", "copy")]
    assert pushes == [("push", 1), ("push", 2), ("copy", "reference", "actor"), ("push", 3)]


def test_without_a_reference_nobody_asks_for_it_and_epochs_repeat_the_update() -> None:
    calls, recorder, end = run(State(), actor=Actor(epochs=2))
    assert ("logprobs", "reference") not in calls
    assert sum(call[0] == "update" for call in calls) == 6
    assert [call[1] for call in calls if call[0] == "push"] == [1, 2, 3]
    assert [call[1] for call in calls if call[0] == "evaluate"] == [2, 3]
    assert [call[1].step for call in calls if call[0] == "save"] == [2, 3]
    assert list(recorder.metrics) == [1, 2, 3] and end == State(3, 3)


def test_a_request_to_stop_commits_the_step_under_way_and_ends_the_loop() -> None:
    calls, recorder, end = run(State(), stop_after=1)
    assert [call[1] for call in calls if call[0] == "save"] == [State(1, 1)]  # no multiple of save_every
    assert list(recorder.metrics) == [1] and end == State(1, 1)


@pytest.mark.parametrize(
    ("step", "every", "last", "expected"), [(4, 2, 9, True), (5, 2, 9, False), (9, 2, 9, True), (9, None, 9, True)]
)
def test_due(step: int, every: int | None, last: int, expected: bool) -> None:
    assert due(step, every, last) is expected
