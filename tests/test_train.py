"""The loop does what its names say, in this order, and hands on what it was given."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.critic import LearningCritic, SyncAfterCritic
from megarl.core.errors import MegarlError
from megarl.core.pending import Finished
from megarl.core.protocols import Handles, State
from megarl.core.timing import PhaseTimer
from megarl.core.types import BatchInfo, EvalResult, MiniBatches
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.roles import Actor, Critic, Reference
from megarl.recipe.run import Model
from megarl.recipe.schema import Data, Eval, Recipe, Rollout, Train
from megarl.train import due, train
from tests.support.recording import Slow, Told, recorder_of

ROLES = ("actor", "reference", "critic", "reward_model", "teacher")


@dataclass(frozen=True)
class Learnable:
    """What the rollout makes of the columns."""

    columns: dict[str, Any]
    metrics: dict[str, float]
    learns: bool = True


@dataclass
class Part:
    """Plays every part but the recorder's, and writes down what it is asked for."""

    name: str
    calls: list[Any]
    drifted: int = 0  # a step that is not to be learned from
    generated: list[str] = field(default_factory=list)  # what is said of the samples of each step

    @property
    def info(self) -> BatchInfo:
        return BatchInfo(0, 0, 2, 1, 10, 10, {"reward/mean": 0.5}, self.generated[-1])

    def next(self, step: int, weight_version: int) -> Any:
        self.calls.append(("next", step, weight_version))
        self.generated.append("" if step == 2 else f"generated at {step}")
        return self

    def advantages(self, batch: Any, columns: dict[str, Any]) -> Learnable:
        self.calls.append(("advantages", dict(columns)))
        return Learnable(
            {"advantages": ("advantages",), "returns": ("returns",)},
            {"reward/kl": 0.25},
            len(self.generated) != self.drifted,
        )

    def evaluate(self, step: int, weight_version: int) -> Finished[EvalResult]:
        self.calls.append(("evaluate", step, weight_version))
        return Finished(EvalResult(1, 1, 1.0, 1.0, {"eval/accuracy": 1.0}, f"evaluated at {step}"))

    def logprobs(self, batch: Any, of: MiniBatches = "all") -> Slow:
        self.calls.append(("logprobs", self.name, *({of} - {"all"})))
        return Slow(self.name, self.calls, (self.name,))

    def top(self, batch: Any, k: int) -> Slow:
        self.calls.append(("top", self.name, k))
        return Slow(self.name, self.calls, (self.name,))

    def values(self, batch: Any) -> Slow:
        self.calls.append(("values", self.name))
        return Slow(self.name, self.calls, (self.name,))

    def update(self, batch: Any, columns: dict[str, Any]) -> Slow:
        self.calls.append(("update", self.name, dict(columns)))
        error = MegarlError("update (critic): it failed") if self.name == "critic that fails" else None
        return Slow(f"{self.name}'s update", self.calls, self._learned(), error)

    def _learned(self) -> dict[str, float]:
        return {f"{self.name}/loss": 1.0, f"{self.name}/skipped_steps": 1}

    def copy_from(self, other: Any) -> None:
        self.calls.append(("copy", self.name, other.name))

    def push(self, weight_version: int) -> dict[str, float]:
        self.calls.append(("push", weight_version))
        return {"sync/weight_version": weight_version}


def run(
    state: State,
    *roles: str,
    stop_after: int = 99,
    drifted: int = 0,
    at_once: bool = True,
    servers_share: bool = False,
    save_every: int | None = 2,
    timer: PhaseTimer | None = None,
    **sections: Any,
) -> tuple[list[Any], Told, State]:
    """The loop over 3 steps with the actor and these roles: calls, what was recorded, and the state in the end.

    at_once: the critic shares the actor's devices. servers_share: it shares the servers'.
    """
    calls: list[Any] = []
    timer = timer or PhaseTimer()
    part: dict[str, Any] = {name: Part(name, calls) for name in ("rollout", "sync", *ROLES)}
    part["rollout"].drifted = drifted
    told = Told(calls)
    sections.setdefault("actor", Actor(mini_batch_samples=1))
    recipe = Recipe(
        model=Model(path=Path("m")),
        data=Data(train=Path("t"), eval=Path("e")),
        rollout=Rollout(prompts_per_step=1, samples_per_prompt=2, max_response_tokens=8),
        eval=Eval(every=2),
        train=Train(steps=3, save_every=save_every),
        **sections,
    )
    if "critic that fails" in roles:
        part["critic"].name = "critic that fails"
    critic = LearningCritic(part["critic"], timer, at_once)
    there = {name: part[name] if name in ("actor", *roles) else None for name in ROLES}
    there["critic"] = critic if recipe.critic is not None else None
    handles = Handles(
        part["rollout"],
        **there,
        sync=SyncAfterCritic(part["sync"], critic) if servers_share else part["sync"],
        recorder=recorder_of(told, stop=lambda: len(part["rollout"].generated) >= stop_after),
        timer=timer,
    )
    return calls, told, train(handles, recipe, state)


def test_samples_that_failed_are_recorded_with_the_step_that_they_are_of() -> None:
    for at_once in (False, True):
        _, told, _ = run(State(weight_version=1), at_once=at_once, critic=Critic())
        assert told.failures == ["generated at 1", "evaluated at 2", "generated at 3"], at_once


def test_one_step_reads_like_the_algorithm() -> None:
    calls, told, end = run(State(2, 5), "reference")
    scored = {"old_logprobs": ("actor",), "ref_logprobs": ("reference",)}
    assert calls == [
        ("next", 3, 5),
        ("logprobs", "actor", "later"),
        ("logprobs", "reference"),
        ("wait", "actor"),
        ("wait", "reference"),
        ("advantages", scored),
        ("update", "actor", {**scored, "advantages": ("advantages",), "returns": ("returns",)}),
        ("wait", "actor's update"),
        ("push", 6),
        ("evaluate", 3, 6),
        ("record", 3),
        ("save", State(3, 6)),
    ]
    assert end == State(3, 6)
    wanted = {"reward/mean", "reward/kl", "actor/loss", "sync/weight_version", "eval/accuracy", "perf/step_s"}
    assert wanted <= set(told.metrics[3])


def test_steps_that_were_left_out_are_counted_over_all_epochs() -> None:
    """Two of the actor, three of the critic: what the last alone says would hide those of the others."""
    _, told, _ = run(State(2, 5), actor=Actor(epochs=2), critic=Critic(epochs=3))
    assert (told.metrics[3]["actor/skipped_steps"], told.metrics[3]["critic/skipped_steps"]) == (2, 3)
    assert told.metrics[3]["actor/loss"] == 1


def test_a_step_of_ppo_asks_every_role_and_updates_the_critic_first() -> None:
    calls, told, _ = run(
        State(2, 5), "reward_model", "teacher", critic=Critic(epochs=2), algorithm=Algorithm(policy_loss="distill")
    )
    scored = {
        "old_logprobs": ("actor",),
        "teacher_logprobs": ("teacher",),
        "values": ("critic",),
        "scores": ("reward_model",),
    }
    learned = {**scored, "advantages": ("advantages",), "returns": ("returns",)}
    # Everybody is asked before anybody is waited for: roles of different pools work at the same time.
    assert calls[1:16] == [
        ("logprobs", "actor", "later"),
        ("logprobs", "teacher"),
        ("values", "critic"),
        ("values", "reward_model"),
        *(("wait", name) for name in ("actor", "teacher", "critic", "reward_model")),
        ("advantages", scored),
        *(("update", "critic", learned), ("wait", "critic's update")),
        *(("update", "critic", learned), ("wait", "critic's update")),
        *(("update", "actor", learned), ("wait", "actor's update")),
    ]
    assert {"critic/loss", "actor/loss"} <= set(told.metrics[3])


def test_a_teacher_says_what_the_loss_asks_it_for() -> None:
    algorithm = Algorithm(policy_loss="distill_top", distill_top_k=5)
    calls, _, _ = run(State(2, 5), "teacher", actor=Actor(), algorithm=algorithm)
    learned = {"teacher_top": ("teacher",), "advantages": ("advantages",), "returns": ("returns",)}
    assert calls[1:5] == [
        ("top", "teacher", 5),
        ("wait", "teacher"),
        ("advantages", {"teacher_top": ("teacher",)}),
        ("update", "actor", learned),
    ]


LOOKED_AT = ("next", "update", "wait", "push", "save", "record", "values")
ACTOR_LEARNS = [("update", "actor"), ("wait", "actor's update")]
WAIT = ("wait", "critic's update")


def order_of(calls: list[Any]) -> list[Any]:
    return [call[:2] for call in calls if call[0] in LOOKED_AT]


def test_a_critic_on_devices_of_its_own_learns_while_the_next_step_is_generated() -> None:
    timer = PhaseTimer()
    calls, told, end = run(State(), at_once=False, save_every=None, timer=timer, critic=Critic())
    asks = [("values", "critic"), ("wait", "actor")]
    learns = [("wait", "critic"), ("update", "critic"), *ACTOR_LEARNS]
    # Values come once it has learned from the step before, whose line is written then. Before the checkpoint it is waited for.
    assert order_of(calls) == [
        *(("next", 1), *asks, *learns, ("push", 1)),
        *(("next", 2), *asks, WAIT, *learns, ("push", 2), ("record", 1)),
        *(("next", 3), *asks, WAIT, *learns, ("push", 3), ("record", 2), WAIT, ("record", 3), ("save", State(3, 3))),
    ]
    waited = ["perf/critic_s" in told.metrics[step] for step in (1, 2, 3)]
    assert waited == [False, True, True], "its seconds count in the step that waits for it"
    together, alike, _ = run(State(), critic=Critic(), save_every=None)
    assert [call for call in calls if call[0] == "update"] == [call for call in together if call[0] == "update"]
    for step in (1, 2, 3):
        ours, theirs = (
            {name: value for name, value in kept.metrics[step].items() if not name.startswith("perf/")}
            for kept in (told, alike)
        )
        assert ours == theirs and "critic/loss" in ours
    assert end == State(3, 3)


def test_servers_on_the_critics_devices_take_no_weights_before_it_has_learned() -> None:
    calls, told, _ = run(State(2, 2), at_once=False, servers_share=True, critic=Critic())
    # It learns beside the actor, on devices that the actor does not have.
    assert order_of(calls)[4:9] == [("update", "critic"), *ACTOR_LEARNS, WAIT, ("push", 3)]
    assert "perf/critic_s" in told.metrics[3]


def test_a_critic_that_fails_beside_the_next_rollout_ends_the_run_in_that_step() -> None:
    timer = PhaseTimer()
    with pytest.raises(MegarlError, match=r"update \(critic\): it failed"):
        run(State(), "critic that fails", at_once=False, save_every=None, timer=timer, critic=Critic())
    assert timer.last == (2, "critic")


def test_a_request_to_stop_waits_for_a_critic_apart() -> None:
    calls, told, _ = run(State(), stop_after=1, at_once=False, critic=Critic())
    assert [call[:2] for call in calls[-3:]] == [WAIT, ("record", 1), ("save", State(1, 1))]
    assert "critic/loss" in told.metrics[1]


def test_the_actor_stands_still_while_the_critic_warms_up() -> None:
    calls, told, _ = run(State(), critic=Critic(warmup_steps=2))
    assert [call[1] for call in calls if call[0] == "update"] == ["critic", "critic", "critic", "actor"]
    assert "actor/loss" not in told.metrics[2] and "actor/loss" in told.metrics[3]


def test_the_rollouts_own_log_probs_save_a_forward_pass() -> None:
    calls, _, _ = run(State(), algorithm=Algorithm(old_logprobs="rollout"))
    assert not [call for call in calls if call[0] == "logprobs"]


def test_one_optimizer_step_takes_the_log_probs_from_its_own_forward_pass() -> None:
    calls, _, _ = run(State(), "reference", actor=Actor())
    assert [call[1] for call in calls if call[0] == "logprobs"] == ["reference"] * 3
    given = [set(call[2]) for call in calls if call[0] == "update"]
    assert given == [{"ref_logprobs", "advantages", "returns"}] * 3


def test_of_several_optimizer_steps_all_but_the_first_are_given_log_probs_of_a_pass() -> None:
    calls, _, _ = run(State(), "reference", actor=Actor(mini_batch_samples=1))
    assert [call[1:] for call in calls if call[0] == "logprobs"] == [("actor", "later"), ("reference",)] * 3


def test_a_step_that_is_not_to_be_learned_from_changes_no_weight_and_the_next_goes_on() -> None:
    calls, told, end = run(State(), drifted=2, critic=Critic())
    learned = [call[1] for call in calls if call[0] == "update"]
    assert learned == ["critic", "actor"] * 2 and end == State(3, 3)
    assert "actor/loss" not in told.metrics[2] and "actor/loss" in told.metrics[3]
    assert [call[1] for call in calls if call[0] == "push"] == [1, 2, 3]


def test_the_reference_becomes_the_actor_every_so_many_steps() -> None:
    calls, _, _ = run(State(), "reference", reference=Reference(refresh_every=2))
    assert [index for index, call in enumerate(calls) if call == ("copy", "reference", "actor")]
    pushes = [call for call in calls if call[0] in ("push", "copy")]
    assert pushes == [("push", 1), ("push", 2), ("copy", "reference", "actor"), ("push", 3)]


def test_without_a_reference_nobody_asks_for_it_and_epochs_repeat_the_update() -> None:
    calls, told, end = run(State(), actor=Actor(epochs=2))
    assert ("logprobs", "reference") not in calls
    assert sum(call[0] == "update" for call in calls) == 6
    assert [call[1] for call in calls if call[0] == "push"] == [1, 2, 3]
    assert [call[1] for call in calls if call[0] == "evaluate"] == [2, 3]
    assert [call[1].step for call in calls if call[0] == "save"] == [2, 3]
    assert list(told.metrics) == [1, 2, 3] and end == State(3, 3)
    rate, seconds = (told.metrics[1][f"perf/{name}"] for name in ("train_tokens_per_s", "update_s"))
    assert rate * seconds == pytest.approx(40), "20 tokens, learned from twice"


def test_a_request_to_stop_commits_the_step_under_way_and_ends_the_loop() -> None:
    calls, told, end = run(State(), stop_after=1)
    assert [call[1] for call in calls if call[0] == "save"] == [State(1, 1)]  # no multiple of save_every
    assert list(told.metrics) == [1] and end == State(1, 1)


@pytest.mark.parametrize(
    ("step", "every", "last", "expected"),
    [
        (4, 2, 9, True),
        (5, 2, 9, False),
        (9, 2, 9, True),
        (9, None, 9, True),
        (4, 2, None, True),
        (9, None, None, False),
    ],
)
def test_due(step: int, every: int | None, last: int | None, expected: bool) -> None:
    assert due(step, every, last) is expected
