"""Played asynchronous rollouts: by hand, and beside the coordinator of real runs in the same world."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from bench.support.rollout_simulation import Driver, World, lengths_of, make_recipe
from bench.support.virtual_time import run_virtual
from megarl.placement import simulate_async
from megarl.placement.lengths import Floats
from megarl.placement.simulate_async import Flow, play
from megarl.rollout.tasks import GroupTask


def flow(lengths: list[float], train_s: float, staleness: int, **others: float) -> Flow:
    """Steps of one group of one sample; a server that decodes one at a time, a token a second."""
    tokens = np.array(lengths).reshape(-1, 1, 1)
    settings = {"sync_s": 0.0, "start_s": 0.0} | others
    return Flow(
        tokens,
        np.full(len(lengths), train_s),
        staleness=staleness,
        servers=1,
        decode_s=np.ones(2),
        sync_s=settings["sync_s"],
        start_s=settings["start_s"],
    )


def test_staleness_lets_the_rollout_run_ahead_by_hand() -> None:
    assert list(play(flow([2, 2, 2], 1, 0)).end_s) == [3, 6, 9]
    assert list(play(flow([2, 2, 2], 1, 1)).end_s) == [3, 5, 7]
    assert list(play(flow([1, 5, 1], 2, 1)).end_s) == [3, 8, 10]


def test_a_sync_and_a_start_keep_the_server_by_hand() -> None:
    # The second sample, begun at 2, has a token when the sync keeps the server from 3 to 4, and ends at 5.
    played = play(flow([2, 2], 1, 1, sync_s=1))
    assert list(played.end_s) == [4, 7]
    assert list(played.busy_s) == [3, 4]
    assert list(play(flow([2, 2], 1, 0, start_s=0.5)).end_s) == [3.5, 7]


def test_sequences_of_one_server_slow_each_other_by_hand() -> None:
    both = Flow(np.array([[[2.0], [4.0]]]), np.ones(1), 0.0, 0, 1, 0.0, np.array([1.0, 1.0, 2.0]))
    # Two tokens of each take 4 s, two more of the longer one alone 2 s.
    assert list(play(both).end_s) == [7]
    assert list(play(both).tail_s) == [0]


def test_a_step_waits_for_what_no_later_one_may_train_on() -> None:
    # Two groups a step on four places; the first group outlives the second step's, which have to wait for it.
    tokens = np.array([[[9.0], [1.0]], [[1.0], [1.0]], [[1.0], [1.0]]])
    played = play(Flow(tokens, np.ones(3), 0.0, 1, 1, 0.0, np.ones(5)))
    # The first step takes two that ended at 1, ends at 2; the second waits until 9.
    assert list(played.end_s) == [2, 10, 11]


def test_a_long_run_holds_no_more_than_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held, and looked through at every event, is of the groups under way; lengths are drawn as they are asked for."""
    played: list[simulate_async._Play] = []
    drawn: list[int] = []

    class Watched(simulate_async._Play):
        def __init__(self, flow: Flow) -> None:
            super().__init__(flow)
            played.append(self)

        def take(self, now_s: float) -> None:
            super().take(now_s)
            assert len(drawn) <= self.version + 3
            assert max(map(len, (self.ages, self.version_of, self.left))) <= 2 * 2 * self.size

    def lengths() -> Iterator[Floats]:
        for step in range(50):
            drawn.append(step)
            yield np.full((4, 2), 1.0 + step % 7)

    monkeypatch.setattr(simulate_async, "_Play", Watched)
    ends = play(Flow(lengths(), np.full(50, 3.0), 0.0, 1, 2, 0.0, np.ones(5))).end_s
    monkeypatch.undo()
    whole = np.array([np.full((4, 2), 1.0 + step % 7) for step in range(50)])
    assert list(ends) == list(play(Flow(whole, np.full(50, 3.0), 0.0, 1, 2, 0.0, np.ones(5))).end_s)
    assert len(drawn) == 50 and not played[0].left and len(played[0].version_of) == len(played[0].finished)


@pytest.mark.parametrize(("staleness", "ratio"), [(1, 0.5), (1, 1.0), (2, 1.0), (4, 1.0)])
def test_beside_the_coordinator_of_real_runs(staleness: int, ratio: float) -> None:
    servers, slots, prompts, samples, steps, token_s, sync_s = 64, 4, 32, 16, 8, 0.02, 5.0
    world = World(slots=servers * slots, mean_tokens=1000.0, sigma=1.0, longest=4096, token_s=token_s)
    numbers = [
        [GroupTask(step * prompts + row, step * prompts + row, 0, 0, samples) for row in range(prompts)]
        for step in range(steps)
    ]
    tokens = np.array([[lengths_of(world, each) for each in groups] for groups in numbers], np.float64)
    train_s = ratio * float(tokens.sum()) / steps * token_s / (servers * slots)

    async def run() -> float:
        recipe = make_recipe(
            prompts=prompts, samples=samples, steps=steps, longest=4096, rollout={"max_staleness": staleness}
        )
        driver = Driver(recipe, world, rows=prompts * steps * 2, beside=True, train_s=train_s, sync_s=sync_s)
        await driver.start()
        for step in range(1, steps + 1):
            await driver.step(step)
        end_s = asyncio.get_running_loop().time()
        await driver.close()
        return end_s

    played = play(Flow(tokens, np.full(steps, train_s), sync_s, staleness, servers, 0.0, np.full(slots + 1, token_s)))
    assert played.end_s[-1] == pytest.approx(run_virtual(run()), rel=0.03)
