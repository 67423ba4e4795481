"""What drivers inside of a cluster do, for tests of several nodes; prints one JSON object, or ends as megarl would.

python -m tests.end_to_end.nodes_driver look FOLDER            # join, look around, leave
python -m tests.end_to_end.nodes_driver survey FOLDER          # the same, after an attempt in a folder of one node alone
python -m tests.end_to_end.nodes_driver stall FOLDER           # join, say `waiting`, wait for a rank that does nothing
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from megarl.cluster import waits
from megarl.cluster.nodes import await_devices
from megarl.cluster.process import ProcessFacts, configure_process
from megarl.cluster.runtime import Runtime
from megarl.cluster.slots import Slot, beside, reserve, server_slots
from megarl.core.errors import DeadlineError, MegarlError
from megarl.core.platform import get_platform
from megarl.core.timing import PhaseTimer

ALONE = Path("/tmp/ray/alone")


class Helper:
    """An actor that waits for nothing."""

    def __init__(self, spec: object) -> None:
        self._facts = configure_process(spec)  # type: ignore[arg-type]

    def facts(self) -> ProcessFacts:
        return self._facts

    def environment(self) -> dict[str, str]:
        return {name: os.environ.get(name, "") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}

    def wait_for_ever(self) -> None:
        threading.Event().wait()


def look(folder: Path) -> dict[str, object]:
    # Ray tells nobody of GPUs where the platform hides them.
    platform = replace(get_platform("cpu"), env={"OMP_NUM_THREADS": "1"})
    with Runtime.start(platform, folder, 2) as runtime:
        members = runtime.nodes.members
        helper = (
            ray.remote(Helper).options(**runtime.slots[1].options).remote(runtime.process("h", runtime.slots[1].node))
        )
        return {
            "nodes": [str(node) for node in members],
            "ranks": [slot.node.name for slot in runtime.slots],
            "servers": [slot.node.name for slot in beside(members, runtime.slots, 2)],
            "gpus": gpu_slots(runtime),
            "missing": missing(),
            "facts": vars(ray.get(helper.facts.remote())),
            "environment": ray.get(helper.environment.remote()),
            "stacks": stacks(runtime, helper, members.index(runtime.slots[1].node)),
        }


def survey(folder: Path) -> dict[str, object]:
    """Look around, and before it say what becomes of a run in a folder that each node has one of its own of."""
    try:
        with Runtime.start(get_platform("cpu"), ALONE, 2):
            alone = (0, "")
    except MegarlError as error:
        alone = (error.exit_code, str(error))
    return {**look(folder), "alone": alone}


def gpu_slots(runtime: Runtime) -> dict[str, object]:
    """Who would sit where on GPUs, of which Ray believes each node to have two."""

    def told(slots: Sequence[Slot]) -> list[tuple[str, tuple[str, ...]]]:
        return [(slot.node.name, slot.devices) for slot in slots]

    platform = get_platform("cuda")
    members = [replace(node, devices=2) for node in runtime.nodes.members]
    ranks = reserve(platform, members, 4)
    own = server_slots(platform, members, ranks, 1, 2)[0]
    return {"ranks": told(ranks), "own": told(own.parts), "own is shared": own.shared}


def stacks(runtime: Runtime, helper: Any, index: int) -> str:
    """What is said of a process that does not answer, wherever it is."""
    worker = waits.Worker(helper, runtime.process("h", runtime.nodes.members[index]), ray.get(helper.facts.remote()))
    try:
        waits.Waiter(PhaseTimer(), runtime.nodes).wait(
            [waits.Call(worker, helper.wait_for_ever.remote())], phase="x", role="y", deadline_s=0.5
        )
    except DeadlineError as error:
        return str(error)
    return ""


def missing() -> str:
    """What is said when more devices are asked for than there are."""
    try:
        await_devices("megarl_cpu_device", 1000, deadline_s=0.5)
    except DeadlineError as error:
        return str(error)
    return ""


def stall(folder: Path) -> None:
    with Runtime.start(get_platform("cpu"), folder, 2) as runtime:
        node = runtime.nodes.members[1]
        spec = runtime.process("helper", node)
        handle = ray.remote(Helper).options(**beside([node], [], 1)[0].options).remote(spec)
        worker = waits.Worker(handle, spec, ray.get(handle.facts.remote()))
        print("waiting", flush=True)
        waiter = waits.Waiter(PhaseTimer(), runtime.nodes)
        call = waits.Call(worker, handle.wait_for_ever.remote())
        waiter.wait([call], phase="update", role="actor", deadline_s=600)


def main() -> None:
    command = {"look": look, "survey": survey, "stall": stall}[sys.argv[1]]
    try:
        print(json.dumps(command(Path(sys.argv[2]))))
    except MegarlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
