"""Which steps of a run can be trained on again, and from where; what is refused, and with which lesson."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.recipe.schema import Recipe
from megarl.rollout.decisions import Decisions
from megarl.rollout.journal import JOURNAL
from megarl.run.journal import MADE_WITH
from megarl.run.preflight import CHECKPOINTS
from megarl.run.replay import compared
from megarl.run.replayable import check_greedy, check_inputs, check_model, check_overrides, check_served, find_replay
from megarl.training.run_checkpoints import Checkpoints
from tests.rollout.test_collector import make_recipe
from tests.support.tiny import write_tiny_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five steps, of which the fourth took a group that was meant for the third; checkpoints of 2 and 4."""
    journal = tmp_path / JOURNAL
    journal.mkdir()
    (journal / MADE_WITH).write_text("{}")

    async def decide() -> None:
        decisions = Decisions(journal)
        for step in range(1, 6):
            decisions.add("admitted", step, [(0, step, 0), (1, step, 0)])
            decisions.add("taken", step, [(0, step, 0), (1, max(1, step - 1), 0)])
        await decisions.close()

    asyncio.run(decide())
    for step in range(1, 6):
        (journal / f"step_{step:06d}-aa.sqlite").touch()
    checkpoints = Checkpoints(tmp_path / CHECKPOINTS, keep_last=2)
    for step in (2, 4):
        checkpoints.begin(step, ["actor"])
        checkpoints.commit(step, {"weight_version": step + 1, "data": {"decisions": 2 * step}})
    return tmp_path


def found(run: Path, first: int | None = None, last: int | None = None) -> tuple[int, int, int]:
    """The step of the checkpoint that it begins with (0: the base model), the first and the last step."""
    replay = find_replay(run, first, last)
    return 0 if replay.start is None else replay.start.step, replay.first, replay.last


def test_all_that_is_there_or_as_little_as_leads_to_what_is_wanted(run: Path) -> None:
    assert found(run) == (0, 1, 5)
    assert found(run, last=3) == (0, 1, 3)
    assert found(run, first=3) == (2, 3, 5)
    assert found(run, first=4, last=4) == (2, 4, 4)
    assert found(run, first=5) == (4, 5, 5)
    assert found(run, first=1, last=1) == (0, 1, 1)
    assert "from the checkpoint of step 2 (steps 3 to 3 lead there)" in find_replay(run, 4, 4).told()


def test_where_samples_were_removed_a_checkpoint_comes_first(run: Path) -> None:
    for step in (1, 2):
        (run / JOURNAL / f"step_{step:06d}-aa.sqlite").unlink()
    # Step 3 took a group that was meant for step 2.
    assert found(run) == (4, 5, 5)
    with pytest.raises(
        UserError, match=r"with --from-step 3: .*There are: steps 5 to 5, from step_000004\..*journal_keep"
    ):
        find_replay(run, 3, None)


def test_what_cannot_be_replayed_is_refused_with_what_can(run: Path) -> None:
    with pytest.raises(
        UserError, match=r"with --to-step 6: .*steps 1 to 5, from the base model; steps 3 to 5, from step_000002"
    ):
        find_replay(run, None, 6)
    with pytest.raises(UserError, match="--to-step 2 is before the first step to replay, 3"):
        find_replay(run, 3, 2)
    (run / CHECKPOINTS / "step_000002" / "state.json").write_text("{}")
    assert found(run, first=3) == (0, 3, 5)  # what is damaged does not count
    (run / JOURNAL / MADE_WITH).unlink()
    with pytest.raises(UserError, match="has no journal to replay"):
        find_replay(run, None, None)


def test_keys_that_decided_the_samples_are_refused() -> None:
    check_overrides(["algorithm.clip_high=0.3", "actor.optimizer.lr=1e-3", "train.steps=9", "model.path=other"])
    with pytest.raises(UserError, match=r"^rollout.temperature, data.train, actor.routing_replay: a replay trains on"):
        check_overrides(["rollout.temperature=2", "actor.clip=1", "data.train=x", "actor.routing_replay=true"])


def test_another_model_learns_from_the_same_tokens_only(run: Path, tmp_path: Path) -> None:
    def of(name: str, vocab: int) -> Recipe:
        folder = tmp_path / name
        write_tiny_model(folder, vocab_size=vocab)
        recipe = make_recipe(tmp_path)
        return recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": folder})})

    first, same, other = of("first", 256), of("same", 256), of("other", 512)
    check_model(first, same, None)
    with pytest.raises(UserError, match="has another vocabulary"):
        check_model(first, other, None)
    with pytest.raises(UserError, match=r"the replay begins with .*step_000002, which is of"):
        check_model(first, same, find_replay(run, 3, None).start)


def test_rows_and_a_checkpoint_are_looked_at_before_anything_starts(run: Path, tmp_path: Path) -> None:
    """The checkpoint as where a run goes on: under another alpha its adapters would be another model."""
    recipe = make_recipe(tmp_path)
    (run / JOURNAL / MADE_WITH).write_text('{"answers of the rows of data.train": "2b"}')
    check_inputs(find_replay(run, 1, 1), recipe, 3, {"answers": "2b", "ids": "1a"})
    with pytest.raises(UserError, match=r"answers of the rows of .* are others than those that .* was trained on"):
        check_inputs(find_replay(run, 1, 1), recipe, 3, {"answers": "3c"})
    with pytest.raises(UserError, match=r"actor[/\\]megarl\.json is missing"):
        check_inputs(find_replay(run, 3, 3), recipe, 3, {"answers": "2b"})


def test_greedy_answers_are_asked_for_only_where_the_run_had_some(tmp_path: Path) -> None:
    plain, greedy = (make_recipe(tmp_path, algorithm={"advantage": name}) for name in ("grpo", "remax"))
    for recorded, recipe in ((plain, plain), (greedy, greedy), (greedy, plain)):
        check_greedy(recorded, recipe)
    with pytest.raises(UserError, match=r"remax compares .* of grpo, asked for none\. Replay it with another"):
        check_greedy(plain, greedy)


def test_what_a_served_teacher_said_is_in_the_journal_or_nowhere(tmp_path: Path) -> None:
    def recipe(loss: str, k: int = 8, **teacher: Any) -> Recipe:
        return make_recipe(tmp_path, algorithm={"policy_loss": loss, "distill_top_k": k}, teacher=teacher)

    served = {"servers": {"urls": ("http://a:1",)}}
    top, tokens, held = recipe("distill_top", **served), recipe("distill", **served), recipe("distill", path=tmp_path)
    for recorded, now in ((top, top), (tokens, tokens), (top, held), (tokens, held), (held, held)):
        check_served(recorded, now)
    with pytest.raises(UserError, match=r"the journal has no teacher_logprobs .* it has teacher_top\. Replay"):
        check_served(top, tokens)
    with pytest.raises(UserError, match=r"no teacher_top .* its algorithm\.distill_top_k"):
        check_served(top, recipe("distill_top", 4, **served))
    with pytest.raises(UserError, match=r"it has nothing of a teacher\. .* or have the teacher on ranks"):
        check_served(held, tokens)


def test_the_first_difference_is_named() -> None:
    before = [{"step": 1, "actor/loss": 0.5, "perf/step_s": 1.0}, {"step": 2, "actor/loss": 0.25, "reward/mean": 1.0}]
    same = [{"step": 2, "actor/loss": 0.25, "reward/mean": 1.0, "perf/step_s": 3.0}]
    assert compared(before, same).endswith("are the run's, to the bit (steps 2 to 2).")
    told = compared(before, [{"step": 2, "actor/loss": 0.125, "reward/mean": 1.0}])
    assert "in step 2: actor/loss was 0.25 and is 0.125; 1 of 2 metrics" in told
    assert "nothing to compare" in compared(before, [{"step": 3}])
