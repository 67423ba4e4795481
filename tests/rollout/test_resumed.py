"""A run that was killed and goes on: what the journal has is trained on again, to the bit, and not asked for twice."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megarl.core.errors import MegarlError
from megarl.core.types import Shard
from megarl.data.prompts import PromptSet
from megarl.rollout import collector
from megarl.rollout.decisions import FILE, read_decisions
from megarl.rollout.journal import JOURNAL
from tests.models.configs import PLAIN
from tests.rollout.samples import make_prompt
from tests.rollout.test_collector import make_recipe
from tests.support.fake_sglang import END, FakeSglang, generation
from tests.support.rollout import LocalRollout
from tests.support.sqlite_files import commits

PROMPTS, STEPS = 12, 6
NUMBERS = itertools.count()


class FreshSglang(FakeSglang):
    """Never answers the same twice, and in no order: what comes again was not asked for again. version: of its weights."""

    version = 0
    dull: Collection[int] = range(4)  # rows that teach nothing, as `_half_dull` answers

    async def respond(self, path: str, body: dict[str, Any]) -> web.Response:
        if path != "/generate":
            return await super().respond(path, body)
        number = next(NUMBERS)
        await asyncio.sleep((number * 7919 % 13) / 2000)
        tokens = [20 + number % 97, *range(5, 6 + number * 31 % 9), END]
        text = "42" if number * 13 % 3 else "41"
        return web.json_response(generation(tokens, version=self.version, text=text))


class Life:
    """One life of a run, from its start or from a saved place to the end of a step."""

    def __init__(
        self,
        folder: Path,
        collectors: int,
        *,
        journal: bool = True,
        replay: Path | None = None,
        sections: dict[str, Any] | None = None,
        **rollout: Any,
    ) -> None:
        sizes = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_response_tokens": 16} | rollout
        self.beside = "oversample" not in sizes and sizes.get("max_staleness", 0) > 0
        self.recipe = make_recipe(
            folder,
            rollout=sizes,
            data={"shuffle": True},
            **{**(sections or {}), "train": {"steps": STEPS, "journal": journal} | (sections or {}).get("train", {})},
        )
        self.collectors, self.replay = collectors, replay
        self.steps: dict[int, Any] = {}
        self.places: dict[int, Any] = {}
        self.asked: list[int] = []  # requests, after each step
        self.rates: list[float] = []  # tokens a second, as each step says
        self.needed: list[bool] = []  # whether servers were, by the end of each step
        self.rewinds: list[float | None] = []  # so far, as each step says
        self.went = False  # whether it has gone back
        self.finished = 0  # groups of the step that was not made
        self.stale: list[float] = []  # samples that are too old to be trained on, in each step
        self.commits: list[int] = []  # steps of checkpoints, of which the newest alone is kept
        self.dies: int | None = None  # the step whose samples die with their collector as they are handed over

    def run(self, last: int, place: Any = None, finished: int | None = None, back: Any = None) -> Life:
        """Until it is killed: after step `last` was made, or once so many of its groups have finished.

        back: the place that the run goes back to in the end.
        """
        asyncio.run(self._run(last, place, finished, back))
        return self

    async def _run(self, last: int, place: Any, finished: int | None, back: Any) -> None:
        fake = FreshSglang()
        async with fake:
            local = LocalRollout(
                self.recipe,
                model=PLAIN,
                prompts=PromptSet(tuple(make_prompt(f"p{at}") for at in range(PROMPTS)), 0),
                server=fake.endpoint,
                num_shards=2,
                num_collectors=self.collectors,
                beside=self.beside,
                replay=self.replay,
            )
            await local.start()
            self.behind = asyncio.create_task(local.coordinator.behind())
            try:
                await self._go(local, fake, last, place, finished)
                if back is not None:
                    self.went = await local.coordinator.rewind(back["step"], back["decisions"])
            finally:
                self.behind.cancel()
                for collector in local.collectors:  # as if killed: nobody adds up
                    await collector.close()
                await local.coordinator._links.close()

    async def _go(self, local: LocalRollout, fake: FreshSglang, last: int, place: Any, finished: int | None) -> None:
        first = 1
        if place is not None:
            local.coordinator.load_state(place)
            first = place["step"] + 1
        for step in range(first, last + 1):
            fake.version = step
            if finished is not None:
                making = asyncio.create_task(local.generate(step, step))
                while local.coordinator.ledger.num("finished") < finished:
                    await asyncio.sleep(0)
                making.cancel()
                await asyncio.gather(making, return_exceptions=True)
                self.finished = local.coordinator.ledger.num("finished")
                break
            shards, info = await local.generate(step, step)
            if step == self.dies:
                await local.replace(0)
                shards, info = await local.generate(step, step)
            self.steps[step] = content(shards, local.coordinator.samples.rewards)
            self.rewinds.append(info.metrics.get("rollout/rewinds"))
            self.rates.append(info.metrics["perf/rollout_tokens_per_s"])
            self.asked.append(len(fake.bodies("/generate")))
            self.stale.append(info.metrics.get("rollout/stale_samples", 0.0))
            self.needed.append(self.behind.done())
            assert info.step == step
            fake.version = step + 1
            await local.coordinator.release(step + 1)  # the next weights are there
            await asyncio.sleep(0.004)
            self.places[step] = local.coordinator.state()
            if step in self.commits:
                place = self.places[step]
                await local.coordinator.decisions.forget(place["decisions"], place["waiting"])


def content(shards: Sequence[Shard], rewards: Any) -> list[Any]:
    """All that ranks train on."""
    micros = [micro for shard in shards for mini in shard.mini_batches for micro in mini.micro_batches]
    parts = [(m.tokens, m.cu_seqlens, m.loss_mask, m.weights, m.rollout_logprobs, m.sample_index) for m in micros]
    return [*(array.tobytes() for part in parts for array in part), np.asarray(rewards).tobytes()]


MODES: list[dict[str, Any]] = [
    {},
    {"max_staleness": 2},
    {"max_staleness": 1, "late": "drop"},
    {"max_staleness": 1, "oversample": 1.5},
]


@pytest.mark.parametrize("rollout", MODES, ids=["synchronous", "asynchronous", "late groups are dropped", "carry-over"])
def test_steps_after_the_checkpoint_are_the_same_to_the_bit(tmp_path: Path, rollout: dict[str, Any]) -> None:
    """Killed after step 4, gone on from the checkpoint of step 2, and from the beginning, with other collectors."""
    before = Life(tmp_path, 2, **rollout).run(4)
    for start, collectors in ((2, 1), (0, 3)):
        after = Life(tmp_path, collectors, **rollout).run(4, before.places.get(start))
        assert sorted(after.steps) == list(range(start + 1, 5))
        for step, made in after.steps.items():
            assert made == before.steps[step], step
        assert after.asked[-1] <= (0 if not rollout else 8 * len(after.steps))
        assert after.needed == [False] * len(after.steps)
        if not rollout:
            assert after.rates == [0.0] * len(after.steps), "no server has made any of these tokens"
    ended = Life(tmp_path, 2, **rollout).run(STEPS, before.places[2])
    assert ended.steps[3] == before.steps[3] and sorted(ended.steps) == [3, 4, 5, 6]
    assert ended.needed == [False, False, True, True]
    again = Life(tmp_path, 1, **rollout).run(STEPS, ended.places[4])
    assert again.steps == {step: ended.steps[step] for step in (5, 6)}


@pytest.mark.parametrize("rollout", MODES, ids=["synchronous", "asynchronous", "late groups are dropped", "carry-over"])
def test_decisions_that_a_checkpoint_makes_needless_change_nothing(tmp_path: Path, rollout: dict[str, Any]) -> None:
    """Committed at steps 1 and 2, killed after 5; then again at 3, while that is made again, and killed after 6."""
    before = Life(tmp_path, 2, **rollout)
    before.commits = [1, 2]
    before.run(5)
    kept = sqlite3.connect(tmp_path / "run" / JOURNAL / FILE).execute("select min(number) from decisions").fetchone()
    assert kept == (before.places[2]["decisions"] + 1,)
    after = Life(tmp_path, 1, **rollout)
    after.commits = [3]
    after.run(STEPS, before.places[2])
    assert {step: after.steps[step] for step in (3, 4, 5)} == {step: before.steps[step] for step in (3, 4, 5)}
    again = Life(tmp_path, 2, **rollout).run(STEPS, after.places[3])
    assert again.steps == {step: after.steps[step] for step in (4, 5, 6)} and not any(again.needed)


BACK = {"train": {"max_rewinds": 2}, "algorithm": {"on_logprob_diff": "rewind", "max_logprob_diff": 1.0}}


@pytest.mark.parametrize("rollout", MODES, ids=["synchronous", "asynchronous", "late groups are dropped", "carry-over"])
def test_a_run_that_goes_back_goes_on_with_other_data_and_whoever_repeats_it_does_too(
    tmp_path: Path, rollout: dict[str, Any]
) -> None:
    """Back from step 4 to the checkpoint of step 2, then from step 3 once more."""
    before = Life(tmp_path, 2, sections=BACK, **rollout).run(4)
    place = before.places[2]
    before = Life(tmp_path, 2, sections=BACK, **rollout).run(4, place, back=place)
    assert before.went and before.rewinds == [0, 0]
    second = Life(tmp_path, 1, sections=BACK, **rollout).run(3, place, back=place)
    assert second.went and second.rewinds == [1] and second.steps[3] != before.steps[3]
    assert second.asked[0] > 0
    third = Life(tmp_path, 1, sections=BACK, **rollout).run(5, place, back=place)
    assert not third.went, "twice is what max_rewinds allows"
    assert third.rewinds == [2, 2, 2] and third.steps[3] not in (before.steps[3], second.steps[3])
    for start in (2, 0):
        again = Life(tmp_path, 3, sections=BACK, **rollout).run(5, place if start else None)
        assert {step: again.steps[step] for step in (3, 4, 5)} == third.steps
        assert again.rewinds == [0.0] * (2 - start) + [2, 2, 2] and not any(again.needed)
    replayed = Life(tmp_path, 2, sections=BACK, replay=tmp_path / "run" / JOURNAL, **rollout).run(5)
    assert {step: replayed.steps[step] for step in (3, 4, 5)} == third.steps
    later = Life(tmp_path, 2, sections=BACK, **rollout).run(5, third.places[4])
    assert later.steps == {5: third.steps[5]} and later.rewinds == [2], "and from a checkpoint after it"


def test_rows_of_what_was_gone_back_over_are_not_asked_for_again(tmp_path: Path) -> None:
    place = Life(tmp_path, 1, sections=BACK).run(1).places[1]
    for _ in range(2):
        assert Life(tmp_path, 1, sections=BACK).run(2, place, back=place).went
    asked = [
        key for each in read_decisions(tmp_path / "run" / JOURNAL, 0) if each.kind == "admitted" for key in each.groups
    ]
    assert sorted(row for row, _, _ in asked) == list(range(PROMPTS))


@pytest.mark.parametrize("rollout", [{}, {"max_staleness": 2}], ids=["synchronous", "asynchronous"])
def test_a_step_waits_for_the_disk_a_few_times(
    tmp_path: Path, rollout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice for its decisions, asked and taken. For samples, synchronously: once a collector, and not once a group."""
    monkeypatch.setattr(collector, "PATIENCE_S", 600.0)  # a busy machine may be slow
    made = []
    for steps in (2, 4):
        folder = tmp_path / str(steps)
        Life(folder, 2, **rollout).run(steps)
        made.append(commits(folder / "run" / JOURNAL / FILE))
    assert made[1] - made[0] <= 2 * 2
    if not rollout:
        assert [commits(path) for path in sorted((tmp_path / "4" / "run" / JOURNAL).glob("step_*.sqlite"))] == [1] * 8


def test_the_step_under_way_takes_what_had_finished(tmp_path: Path) -> None:
    """Killed while the servers still answered."""
    before = Life(tmp_path, 1).run(1)
    killed = Life(tmp_path, 1).run(2, before.places[1], finished=2)
    assert sorted(killed.steps) == [] and killed.finished >= 2
    again = Life(tmp_path, 2).run(2, before.places[1])
    assert again.asked[0] <= 2 * (4 - killed.finished)  # what was written down and not told counts as well


def test_what_is_damaged_is_made_anew_and_the_steps_behind_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = Life(tmp_path, 1).run(4)
    for path in (tmp_path / "run" / JOURNAL).glob("step_000003-*.sqlite"):
        with sqlite3.connect(path) as file:
            file.execute("update samples set reward = reward + 1 where rowid = 5")
    after = Life(tmp_path, 1).run(4, before.places[1])
    assert after.steps[2] == before.steps[2]
    assert after.steps[3] != before.steps[3] and after.steps[4] != before.steps[4]
    assert after.asked == [0, 2, 2 + 8] and after.needed == [False, True, True]
    assert "the checksum of sample" in caplog.text and "samples of step 3 were made anew" in caplog.text


def test_what_was_left_behind_is_not_found_by_a_later_life(tmp_path: Path) -> None:
    """The second life takes another way from step 3 on, and is killed while nothing of step 4 has finished."""
    folder = tmp_path / "run" / JOURNAL
    before = Life(tmp_path, 1).run(4)
    for path in folder.glob("step_000003-*.sqlite"):
        with sqlite3.connect(path) as file:
            file.execute("update samples set reward = reward + 1 where rowid = 5")
    place = Life(tmp_path, 1).run(3, before.places[1]).places[3]
    there = set(folder.glob("step_*.sqlite"))
    second = Life(tmp_path, 1).run(4, place)
    assert second.steps[4] != before.steps[4]
    for path in set(folder.glob("step_*.sqlite")) - there:
        path.unlink()
    third = Life(tmp_path, 1).run(4, place)
    assert third.asked == [8] and third.steps[4] not in (before.steps[4], second.steps[4])


def test_behind_a_life_without_a_journal_nothing_of_an_earlier_one_is_found(tmp_path: Path) -> None:
    Life(tmp_path, 1, max_staleness=2).run(4)
    place = Life(tmp_path, 1, max_staleness=2, journal=False).run(2).places[2]
    assert place["waiting"]
    began = time.time()
    Life(tmp_path, 1, max_staleness=2).run(3, place)
    for path in (tmp_path / "run" / JOURNAL).glob("step_*.sqlite"):
        assert sqlite3.connect(path).execute("select min(written) from samples").fetchone()[0] >= began


def test_without_a_journal_all_is_made_anew(tmp_path: Path) -> None:
    before = Life(tmp_path, 1, journal=False).run(2)
    assert not (tmp_path / "run" / JOURNAL).exists()
    assert Life(tmp_path, 1, journal=False).run(2, before.places[1]).asked == [8]


@pytest.mark.parametrize("rollout", MODES, ids=["synchronous", "asynchronous", "late groups are dropped", "carry-over"])
def test_a_journal_is_replayed_without_servers_and_stays_as_it_is(tmp_path: Path, rollout: dict[str, Any]) -> None:
    before = Life(tmp_path / "run", 2, **rollout).run(4)
    journal = tmp_path / "run" / "run" / JOURNAL
    written = {path.name: path.read_bytes() for path in journal.iterdir()}
    for start, collectors in ((0, 1), (2, 3)):
        replayed = Life(tmp_path / "other", collectors, replay=journal, **rollout).run(4, before.places.get(start))
        assert replayed.steps == {step: before.steps[step] for step in range(start + 1, 5)}
        assert replayed.asked[-1] == 0
    assert {path.name: path.read_bytes() for path in journal.iterdir()} == written
    assert not (tmp_path / "other" / "run" / JOURNAL).exists()


@pytest.mark.parametrize(("rollout", "dies"), [(MODES[0], 2), (MODES[1], 1), (MODES[3], 3)])
def test_a_collector_that_dies_as_it_hands_over_what_the_journal_has_changes_nothing(
    tmp_path: Path, rollout: dict[str, Any], dies: int
) -> None:
    before = Life(tmp_path / "run", 2, **rollout).run(3)
    replayed = Life(tmp_path / "other", 2, replay=tmp_path / "run" / "run" / JOURNAL, **rollout)
    again = Life(tmp_path / "run", 2, **rollout)
    for life in (replayed, again):
        life.dies = dies
        assert life.run(3).steps == before.steps and life.asked[1] == 0


def test_a_replay_leaves_out_greedy_answers_that_it_has_no_use_for(tmp_path: Path) -> None:
    before = Life(tmp_path / "run", 1, sections={"algorithm": {"advantage": "remax"}}).run(2)
    replayed = Life(tmp_path / "other", 1, replay=tmp_path / "run" / "run" / JOURNAL).run(2)
    assert replayed.steps == before.steps


def test_what_the_journal_lacks_ends_a_replay(tmp_path: Path) -> None:
    Life(tmp_path / "run", 1).run(2)
    journal = tmp_path / "run" / "run" / JOURNAL
    with pytest.raises(MegarlError, match=r"cannot be replayed any further: what step 3 took is not known.*--to-step"):
        Life(tmp_path / "other", 1, replay=journal).run(3)
    for path in journal.glob("step_000002-*.sqlite"):
        with sqlite3.connect(path) as file:
            file.execute("update samples set reward = reward + 1 where rowid = 5")
    with pytest.raises(MegarlError, match="a group that step 2 had is not in it, or damaged"):
        Life(tmp_path / "other", 1, replay=journal).run(2)
