"""The order and the bound of requests, and what becomes of those that are given up."""

from __future__ import annotations

import asyncio

import pytest

from bench.support.virtual_time import run_virtual
from megarl.rollout.gate import Gate


def gate_of(most: int, servers: float = 1.0) -> Gate:
    return Gate(most, servers, asyncio.get_running_loop().time)


async def asks(
    gate: Gate, name: str, began: list[str], expected: float = 0.0, seconds: float = 1.0, step: int = 0
) -> None:
    async with gate.request(step, expected):
        began.append(name)
        await asyncio.sleep(seconds)


def test_the_longest_expected_go_first_and_no_more_than_may() -> None:
    async def go() -> tuple[list[str], list[int], float]:
        gate, began, most = gate_of(2), [], []
        lengths = {"a": 1.0, "b": 5.0, "c": 3.0, "d": 9.0, "e": 3.0}
        tasks = [asyncio.create_task(asks(gate, name, began, each)) for name, each in lengths.items()]
        for _ in range(3):
            await asyncio.sleep(0.5)
            most.append(gate.running)
            await asyncio.sleep(0.5)
        await asyncio.gather(*tasks)
        return began, most, gate.busy_s()

    began, most, busy_s = run_virtual(go())
    # The first two found the gate empty; then by length, and equals in their order.
    assert began == ["a", "b", "d", "c", "e"]
    assert most == [2, 2, 1]
    assert busy_s == pytest.approx(3.0)


def test_a_request_that_was_cut_off_goes_before_those_of_the_step_after() -> None:
    async def go() -> list[str]:
        gate, began = gate_of(1), []
        first = asyncio.create_task(asks(gate, "due", began, step=1))
        await asyncio.sleep(0.1)
        ahead = asyncio.create_task(asks(gate, "ahead, and long", began, expected=9.0, step=2))
        await asyncio.sleep(0.1)
        gate.close()
        await first
        again = asyncio.create_task(asks(gate, "due, again", began, step=1))
        await asyncio.sleep(0.1)
        gate.open()
        await asyncio.gather(ahead, again)
        return began

    assert run_virtual(go()) == ["due", "due, again", "ahead, and long"]


def test_a_closed_gate_lets_those_end_that_run() -> None:
    async def go() -> None:
        gate, began = gate_of(1), []
        tasks = [asyncio.create_task(asks(gate, name, began)) for name in "ab"]
        await asyncio.sleep(0.1)
        gate.close()
        assert (gate.closed, gate.running, gate.queued) == (True, 1, 1)
        await gate.idle()
        assert asyncio.get_running_loop().time() == pytest.approx(1.0)
        await asyncio.sleep(5)
        assert began == ["a"]
        gate.open()
        await asyncio.gather(*tasks)
        assert began == ["a", "b"] and asyncio.get_running_loop().time() == pytest.approx(7.0, abs=0.2)
        assert gate.busy_s() == pytest.approx(2.0)

    run_virtual(go())


@pytest.mark.parametrize("cancelled", ["running", "queued", "just begun"])
def test_a_request_that_is_given_up_leaves_its_place_to_the_next(cancelled: str) -> None:
    async def go() -> None:
        gate, began = gate_of(1), []
        first, second, third = (asyncio.create_task(asks(gate, name, began)) for name in "abc")
        await asyncio.sleep(0.1)
        if cancelled == "just begun":  # its turn has come, and it has not been told yet
            first.cancel()
            await asyncio.sleep(0)
            second.cancel()
        else:
            (first if cancelled == "running" else second).cancel()
        done = await asyncio.gather(first, second, third, return_exceptions=True)
        assert "c" in began and done[2] is None
        assert (gate.running, gate.queued) == (0, 0)
        await gate.idle()

    run_virtual(go())


def test_servers_are_idle_by_what_they_lack_of_requests() -> None:
    async def go() -> float:
        gate = gate_of(8, servers=4)
        await asyncio.gather(*(asks(gate, name, []) for name in "ab"))
        return gate.busy_s()

    assert run_virtual(go()) == pytest.approx(0.5)
