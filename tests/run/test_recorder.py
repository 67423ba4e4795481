"""The recorder writes lines in the order of the steps, each once all of it has come, and commits no checkpoint before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import MegarlError
from megarl.core.pending import Finished, Once
from megarl.core.protocols import State
from megarl.core.timing import PhaseTimer
from megarl.core.types import EvalResult
from megarl.recipe.batch import plan_batches
from megarl.recipe.placement import Placement, Pool
from megarl.recipe.roles import Critic
from megarl.recipe.run import Cluster, Model
from megarl.recipe.schema import Data, Recipe, Rollout, Train
from megarl.run.recorder import Recorder
from tests.support.recording import Slow, Told, recorder_of


def expect(recorder: Recorder, step: int, *, metrics: dict[str, float], calls: list[Any]) -> Once[dict[str, float]]:
    coming: Once[dict[str, float]] = Once(Slow(f"of {step}", calls, metrics), PhaseTimer(), "critic")
    recorder.expect(step, coming)
    return coming


def test_a_line_waits_for_what_is_expected_of_it_and_later_lines_wait_for_it() -> None:
    calls: list[Any] = []
    told = Told(calls)
    recorder = recorder_of(told)
    first = expect(recorder, 1, metrics={"critic/vf_loss": 1.0}, calls=calls)
    recorder.end_of(1, {"reward/mean": 0.1}, "first")
    recorder.end_of(2, {"reward/mean": 0.2}, "second")
    assert calls == [], "nobody has waited for the first step's, and the second is not written before it"
    first.wait()
    recorder.end_of(3, {"reward/mean": 0.3})
    assert calls == [("wait", "of 1"), ("record", 1), ("record", 2), ("record", 3)]
    assert told.failures == ["first", "second", ""]
    host = told.metrics[1].pop("perf/host_memory_bytes")
    assert told.metrics[1].pop("perf/recoveries") == 0
    peaks = {"memory/actor/update": 1.0, "perf/rank_peak_bytes": 1.0}
    assert host > 0 and told.metrics[1] == {"reward/mean": 0.1, "critic/vf_loss": 1.0, **peaks}
    assert "critic/vf_loss" not in told.metrics[2]
    # Asked for as each step ended: later, the answer would wait for what ranks do then.
    assert [told.metrics[step]["memory/actor/update"] for step in (1, 2, 3)] == [1, 2, 3]


def test_what_has_come_is_written_with_its_step() -> None:
    calls: list[Any] = []
    told = Told(calls)
    recorder = recorder_of(told)
    for step, failure in ((1, ""), (2, "of samples")):
        recorder.expect(step, Finished({"critic/vf_loss": 1.0}))
        recorder.expect(step, Finished(EvalResult(1, 1, 1.0, 1.0, {"eval/accuracy": 1.0}, "of held-out answers")))
        recorder.end_of(step, {}, failure)
    assert calls == [("record", 1), ("record", 2)]
    assert told.metrics[2].items() >= {"eval/accuracy": 1.0, "critic/vf_loss": 1.0}.items()
    assert told.failures == ["of held-out answers", "of samples"], "what failed first says more"


def test_a_step_without_an_update_of_the_actor_has_no_flops_of_one() -> None:
    told = Told([])
    recorder = recorder_of(told)
    recorder.end_of(1, {"perf/train_flops": 8e12, "perf/rollout_s": 1.0})
    recorder.end_of(2, {"perf/train_flops": 8e12, "perf/update_s": 2.0})
    assert told.metrics[1]["perf/train_flops"] == 0 and "perf/tflops_per_device" not in told.metrics[1]
    assert told.metrics[2]["perf/train_flops"] == 8e12 and told.metrics[2]["perf/tflops_per_device"] > 0


def test_rates_of_the_update_are_of_the_devices_that_the_actor_is_on() -> None:
    """A critic in a pool of its own has no part in the actor's update."""
    actor, critic = Pool(devices=2, roles=("actor",)), Pool(devices=6, roles=("critic",))
    recipe = Recipe(
        model=Model(path=Path("m")),
        data=Data(train=Path("t")),
        rollout=Rollout(prompts_per_step=4, samples_per_prompt=2, max_response_tokens=8),
        train=Train(steps=1),
        critic=Critic(),
        cluster=Cluster(devices=8),
        placement=Placement(pools={"actor": actor, "critic": critic}),
    )
    told = Told([])
    recorder_of(told, devices=plan_batches(recipe).devices).end_of(1, {"perf/train_flops": 8e12, "perf/update_s": 2.0})
    assert told.metrics[1]["perf/tflops_per_device"] == 2 and told.metrics[1]["perf/mfu"] == 0.5


@pytest.mark.parametrize("async_save", [False, True])
def test_a_checkpoint_waits_for_all_that_its_step_and_earlier_ones_expect(async_save: bool) -> None:
    calls: list[Any] = []
    recorder = recorder_of(Told(calls), async_save=async_save)
    for step in (1, 2):
        expect(recorder, step, metrics={}, calls=calls)
        if step == 1:
            recorder.end_of(1, {})
    recorder.save(State(2, 3))
    recorder.end_of(2, {})
    expect(recorder, 3, metrics={}, calls=calls)
    recorder.end_of(3, {})
    before = [("wait", "of 1"), ("record", 1), ("wait", "of 2")]
    if async_save:
        # Committed with the next step, which still learns: it is asked for as that step ends, before more is begun.
        assert calls == [*before, "written later", ("record", 2), "asked whether it is whole"]
        recorder.finish()
        assert calls[6:] == [("save", State(2, 3)), ("wait", "of 3"), ("record", 3)]
    else:
        assert calls == [*before, ("record", 2), ("save", State(2, 3))], "who goes on from it finds its step's line"
        recorder.finish()
        assert calls[5:] == [("wait", "of 3"), ("record", 3)]
    recorder.finish()
    assert calls[-1] == ("record", 3), "nothing is done twice"


def test_nothing_is_committed_of_a_step_whose_line_cannot_be_written() -> None:
    """A rank may die once the checkpoint is whole: a run that went on from it would never write the line."""
    calls: list[Any] = []
    recorder = recorder_of(Told(calls))
    recorder.save(State(1, 1))
    recorder.take_peaks = lambda: Slow("of ranks", calls, error=MegarlError("rank 1 died"))
    with pytest.raises(MegarlError, match="rank 1 died"):
        recorder.end_of(1, {})
    assert calls == [("wait", "of ranks")]


def test_nothing_is_committed_of_a_step_that_was_not_learned_from() -> None:
    calls: list[Any] = []
    recorder = recorder_of(Told(calls))
    recorder.expect(1, Slow("of 1", calls, error=MegarlError("update (critic): it failed")))
    with pytest.raises(MegarlError, match=r"update \(critic\)"):
        recorder.save(State(1, 1))
    assert calls == [("wait", "of 1")]
