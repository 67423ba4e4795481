"""The supervised loop asks everybody in order, and looks at held-out rows before, during and after."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megarl.core.pending import Finished
from megarl.core.protocols import State
from megarl.core.timing import PhaseTimer
from megarl.core.types import BatchInfo
from megarl.recipe.run import Model
from megarl.recipe.supervised import HeldOut, PairData, Rm, RmRecipe, SftTrain
from megarl.sft import SupervisedHandles, supervise


@dataclass(frozen=True)
class HeldOutRows:
    """Rows of which no more is asked here than what stands beside them."""

    mismatched: Any


@dataclass
class Recorder:
    """Plays every part, and writes down what it is asked for.

    others: the mismatched rows beside those that it hands out. log_ratio: what the model says of these.
    """

    calls: list[Any]
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    stop_after: int = 99  # the step in which somebody asks
    others: Any = None
    log_ratio: float = 0.0

    @property
    def info(self) -> BatchInfo:
        return BatchInfo(0, 0, 2, 1, 10, 10, {"data/epoch": 0.0})

    @property
    def mismatched(self) -> Any:
        return self.others

    def take(self, step: int) -> Any:
        self.calls.append(("take", step))
        return self

    def held_out(self) -> Any:
        self.calls.append("held out")
        return HeldOutRows(self.others and f"held-out {self.others}")

    def logprobs(self, batch: Any) -> Finished[Any]:
        self.calls.append("reference")
        return Finished((f"reference's of {batch}",) if isinstance(batch, str) else ("reference's",))

    def update(self, batch: Any, columns: dict[str, Any], kl: float) -> Finished[Any]:
        self.calls.append(("update", dict(columns), *([kl] if kl else [])))
        return Finished({"rm/loss": 1.0})

    def evaluate(self, batch: Any, columns: dict[str, Any], kl: float) -> Finished[Any]:
        if isinstance(batch, str):
            assert kl == 0, "the estimate is the log-ratio itself"
            self.calls.append((batch, dict(columns)))
            return Finished({"kto/log_ratio": self.log_ratio})
        assert isinstance(batch, HeldOutRows)
        self.calls.append(("evaluate", dict(columns), *([kl] if kl else [])))
        return Finished({"rm/loss": 2.0, "rm/accuracy": 0.5})

    def end_of(self, step: int, metrics: dict[str, float], failure: str = "") -> None:
        self.calls.append(("end", step))
        self.metrics[step] = metrics

    def save(self, state: State) -> None:
        self.calls.append(("save", state))

    def stopping(self) -> bool:
        return any(call == ("take", self.stop_after) for call in self.calls)


def recipe(*, held_out: bool, every: int | None = None, **train: Any) -> RmRecipe:
    file = Path("rows.jsonl")
    return RmRecipe(
        model=Model(path=Path("model")),
        data=PairData(train=file, eval=file if held_out else None),
        rm=Rm(),
        eval=HeldOut(every=every),
        train=SftTrain(steps=3, batch_samples=2, **train),
    )


def run(
    settings: RmRecipe, steps_done: int = 0, *, reference: bool = False, stop_after: int = 99, **played: Any
) -> tuple[Recorder, State]:
    recorder = Recorder([], stop_after=stop_after, **played)
    handles = SupervisedHandles(recorder, recorder, recorder if reference else None, recorder, PhaseTimer())
    return recorder, supervise(handles, settings, State(steps_done, steps_done))


def test_a_step_without_a_reference_or_held_out_rows() -> None:
    recorder, end = run(recipe(held_out=False, save_every=2))
    step = [("update", {})]
    assert recorder.calls == [
        *[("take", 1), *step, ("end", 1)],
        *[("take", 2), *step, ("save", State(2, 2)), ("end", 2)],
        *[("take", 3), *step, ("save", State(3, 3)), ("end", 3)],
    ]
    assert end == State(3, 3)
    assert recorder.metrics[1]["rm/loss"] == 1.0 and "perf/update_s" in recorder.metrics[1]


def test_the_reference_speaks_before_the_update() -> None:
    recorder, _ = run(recipe(held_out=False), 2, reference=True)
    assert recorder.calls[:3] == [("take", 3), "reference", ("update", {"ref_logprobs": ("reference's",)})]


@pytest.mark.parametrize(("every", "steps"), [(None, [0, 3]), (2, [0, 2, 3]), (1, [0, 1, 2, 3])])
def test_held_out_rows_are_looked_at_before_during_and_after(every: int | None, steps: list[int]) -> None:
    recorder, _ = run(recipe(held_out=True, every=every))
    seen = {step: row for step, row in recorder.metrics.items() if "rm/eval_accuracy" in row}
    assert list(seen) == steps
    assert all((row["rm/eval_loss"], row["rm/eval_accuracy"]) == (2.0, 0.5) for row in seen.values())
    assert recorder.calls.count("held out") == 1, "rows are packed once"
    assert all(row["rm/loss"] == 1.0 for step, row in recorder.metrics.items() if step)


def test_the_reference_speaks_of_held_out_rows_once() -> None:
    recorder, _ = run(recipe(held_out=True, every=1), reference=True)
    assert sum(call[0] == "evaluate" for call in recorder.calls) == 4
    assert recorder.calls.count("reference") == 1 + 3, "the held-out rows, and those of three steps"
    done, _ = run(recipe(held_out=True), 3, reference=True)
    assert done.calls == ["held out"], "a run that is done asks nobody"


@pytest.mark.parametrize(("log_ratio", "kl"), [(0.75, [0.75]), (-0.75, [])])
def test_the_kl_of_mismatched_rows_is_known_before_others_are_learned_from(log_ratio: float, kl: list[float]) -> None:
    """By the weights of that moment; it is never below 0."""
    recorder, _ = run(recipe(held_out=True), 2, reference=True, others="mismatched", log_ratio=log_ratio)
    of_rows = {"ref_logprobs": ("reference's",)}
    both = [{"ref_logprobs": (f"reference's of {name}",)} for name in ("mismatched", "held-out mismatched")]
    assert recorder.calls[:9] == [
        *["held out", "reference", "reference"],
        *[("take", 3), "reference", "reference", ("mismatched", both[0]), ("update", of_rows, *kl)],
        ("held-out mismatched", both[1]),
    ]
    assert recorder.calls[9] == ("evaluate", of_rows, *kl)
    assert "perf/logprobs_s" in recorder.metrics[3]


def test_a_kl_that_is_no_number_is_not_taken_for_none() -> None:
    recorder, _ = run(recipe(held_out=False), 2, reference=True, others="mismatched", log_ratio=math.nan)
    [told] = [call for call in recorder.calls if call[0] == "update"]
    assert math.isnan(told[2])


def test_a_run_that_goes_on_does_not_look_at_the_beginning_again() -> None:
    recorder, _ = run(recipe(held_out=True), 1, reference=True)
    assert list(recorder.metrics) == [2, 3]
    assert ("evaluate", {"ref_logprobs": ("reference's",)}) in recorder.calls


def test_a_run_stops_with_its_step_saved_when_asked() -> None:
    recorder, end = run(recipe(held_out=False), stop_after=2)
    assert end == State(2, 2)
    assert recorder.calls[-2:] == [("save", State(2, 2)), ("end", 2)]
