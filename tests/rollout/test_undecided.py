"""A run that goes on with what was under way and not decided yet: groups that teach nothing, that failed, that are old."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megarl.core.errors import MegarlError
from megarl.core.types import Prompt
from megarl.rewards.combine import Combined, Graders
from megarl.rollout.coordinator import Coordinator
from megarl.rollout.decisions import read_decisions
from megarl.rollout.journal import JOURNAL, Journal, Written, forget_groups
from megarl.rollout.tasks import GroupTask, News
from tests.rollout.test_resumed import PROMPTS, STEPS, FreshSglang, Life
from tests.support.fake_sglang import END, FakeSglang, generation

DYNAMIC: dict[str, Any] = {"algorithm": {"drop_zero_variance_groups": True, "refill_rounds": 2}}

KEPT = {"algorithm": {**DYNAMIC["algorithm"], "keep_groups": {"grader": "exact", "below": 0.9}}}


async def _half_dull(self: FreshSglang, path: str, body: dict[str, Any]) -> web.Response:
    """By prompt and seed alone; the lower rows teach nothing, and the lower they are, the later they end."""
    if path != "/generate":
        return await FakeSglang.respond(self, path, body)
    seed, row = body["sampling_params"]["sampling_seed"], body["input_ids"][0] - 10
    await asyncio.sleep((PROMPTS - row) / 40)
    text = "42" if seed % 2 and row not in self.dull else "41"
    return web.json_response(generation([20 + seed % 97, END], version=self.version, text=text))


def test_what_had_finished_and_teaches_nothing_is_replaced_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed once one such group was replaced: the coordinator; its collector went on for a while."""
    monkeypatch.setattr(FreshSglang, "respond", _half_dull)
    whole = Life(tmp_path / "whole", 1, sections=DYNAMIC, samples_per_prompt=8).run(2)
    plain, heard, all_heard = Coordinator._told, set[int](), asyncio.Event()

    async def told(self: Coordinator, owner: int, news: News) -> None:
        for facts in news.finished:  # one by one: two that end at once would be replaced at once
            heard.add(facts.group)
            if not self._refills.replaced:
                await plain(self, owner, News([facts]))
        if self._refills.replaced and {entry.asked.group for entry in self.ledger.running()} <= heard:
            all_heard.set()

    async def kill(life: Life) -> None:
        running = asyncio.create_task(life._run(2, None, None, None))
        await asyncio.wait_for(all_heard.wait(), 60)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "_told", told)
        killed = Life(tmp_path, 1, sections=DYNAMIC, samples_per_prompt=8)
        asyncio.run(kill(killed))
    decided = [each for each in read_decisions(tmp_path / "run" / JOURNAL, 0) if each.kind != "admitted"]
    assert [(each.kind, len(each.groups)) for each in decided] == [("taken", 4), ("dull", 1)]
    again = Life(tmp_path, 1, sections=DYNAMIC, samples_per_prompt=8).run(2)
    assert again.steps == whole.steps and again.asked[0] == 0


def test_groups_that_one_collector_is_slow_to_read_are_trained_on_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped and gone on with: what a quick disk has newer is not taken before what a slow one has older."""
    place = Life(tmp_path, 2, max_staleness=1).run(3).places[3]
    plain = Journal.find

    async def find(self: Journal, task: GroupTask, prompt: Prompt) -> Written | None:
        if task.group % 2:  # the second collector's
            await asyncio.sleep(0.3)
        return await plain(self, task, prompt)

    monkeypatch.setattr(Journal, "find", find)
    assert Life(tmp_path, 2, max_staleness=1).run(5, place).stale == [0, 0]


@pytest.mark.parametrize(
    ("sections", "rollout"),
    [({}, {}), ({}, {"max_staleness": 2}), (DYNAMIC, {}), (KEPT, {})],
    ids=["synchronous", "asynchronous", "groups are replaced", "groups are kept by a grader's mean"],
)
def test_what_a_step_was_refused_for_is_sampled_and_graded_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], rollout: dict[str, Any]
) -> None:
    """The grader is gone behind the checkpoint, but for a group; whoever mends it and goes on comes to the end."""
    place = Life(tmp_path, 1, sections=sections, **rollout).run(2).places[2]
    plain, numbers = Graders.grade, itertools.count()

    async def gone(self: Graders, *about: Any, **more: Any) -> Combined:
        graded = await plain(self, *about, **more)
        return graded if next(numbers) < 2 else Combined(0.0, {"exact": None}, "exact: nobody is there")

    with monkeypatch.context() as patch:
        patch.setattr(Graders, "grade", gone)
        with pytest.raises(MegarlError, match="grades failed, and"):
            Life(tmp_path, 1, sections=sections, **rollout).run(STEPS, place)
    again = Life(tmp_path, 1, sections=sections, **rollout).run(STEPS, place)
    assert sorted(again.steps) == [3, 4, 5, 6]
    assert Life(tmp_path, 1, sections=sections, **rollout).run(STEPS, place).steps == again.steps


def test_a_group_that_was_replaced_and_is_damaged_is_not_replaced_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FreshSglang, "respond", _half_dull)
    Life(tmp_path, 1, sections=DYNAMIC, samples_per_prompt=8).run(2)
    folder = tmp_path / "run" / JOURNAL
    [key, *_] = next(
        each for each in read_decisions(folder, 0) if each.kind == "dull"
    ).groups  # two, where both end at once
    forget_groups(folder, [key])
    monkeypatch.setattr(FreshSglang, "dull", ())
    Life(tmp_path, 1, sections=DYNAMIC, samples_per_prompt=8).run(2)
    [became] = [each.kind for each in read_decisions(folder, 0) if key in each.groups and each.kind != "admitted"]
    assert became == "taken", "it teaches something now"
