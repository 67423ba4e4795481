"""Whether a collector stands still. One that has ended is found without this; of one that is frozen nobody would hear."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError

from megarl.cluster.process import ProcessFacts
from megarl.core.process_state import stopped
from megarl.recipe.run import Deadlines
from megarl.serving.vigil import LOOK_S, Vigil


@dataclass(frozen=True)
class Silent:
    """A collector that does not go on, and why one thinks so. facts: where it runs; None where it never said."""

    facts: ProcessFacts | None
    why: str


async def until_silent(handle: Any, deadlines: Deadlines, address: str, look_s: float = LOOK_S) -> Silent:
    """Returns once the collector stands still, or is silent for deadlines.answer_s; where it ends, never.

    address: of this process's node. Whether a process is stopped by a signal is seen on its own node alone; elsewhere its
    silence tells.
    """
    asked = _ask(handle)
    ended, _ = await asyncio.wait([asked], timeout=deadlines.start_s)
    if not ended:
        return Silent(None, f"It did not start within {deadlines.start_s:g} s.")
    facts = asked.result()
    if facts is None:
        return await _never()
    vigil, clock = Vigil(deadlines.answer_s), asyncio.get_running_loop().time
    at = clock()
    while True:
        await asyncio.wait([asked], timeout=look_s) if not asked.done() else await asyncio.sleep(look_s)
        if asked.done() and asked.result() is None:
            return await _never()
        frozen = stopped(facts.pid) if facts.address == address else None
        trouble = vigil.saw([frozen] if frozen else []) or vigil.heard(asked.done() or clock() - at < vigil.ask_every_s)
        if trouble:
            return Silent(facts, trouble)
        if asked.done() and clock() - at >= vigil.ask_every_s:
            asked, at = _ask(handle), clock()


def _ask(handle: Any) -> asyncio.Task[ProcessFacts | None]:
    async def answer() -> ProcessFacts | None:
        try:
            facts: ProcessFacts = await handle.facts.remote()
        except RayActorError:
            return None  # its end is watched elsewhere
        return facts

    return asyncio.create_task(answer())


async def _never() -> Silent:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")
