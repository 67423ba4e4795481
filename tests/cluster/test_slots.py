"""Who sits where: by node and device; servers beside the ranks where there is room."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from megarl.cluster.nodes import Node
from megarl.cluster.runtime import Runtime
from megarl.cluster.slots import Slot, _devices, beside, ranks_beside, server_slots, share_no_device, slot_on
from megarl.core.errors import DeadlineError, UserError
from megarl.core.platform import get_platform, num_local_devices

CUDA = get_platform("cuda")


def nodes(count: int) -> list[Node]:
    return [Node(f"n{index}", f"10.0.0.{index}", f"{index:056x}", Path("/tmp"), devices=2) for index in range(count)]


def names(slots: Sequence[Slot]) -> list[str]:
    return [slot.node.name for slot in slots]


def gpus(*places: tuple[Node, str]) -> list[Slot]:
    return [Slot(node, (device,), {}) for node, device in places]


def test_servers_are_dealt_to_nodes_without_ranks() -> None:
    made = nodes(4)
    ranks = [slot_on(made[0]), slot_on(made[1]), slot_on(made[1])]
    assert names(beside(made, ranks, 3)) == ["n2", "n3", "n2"]


def test_servers_share_nodes_with_ranks_where_there_is_no_other() -> None:
    made = nodes(2)
    assert names(beside(made, [slot_on(each) for each in made], 3)) == ["n0", "n1", "n0"]
    assert names(beside(made[:1], [], 2)) == ["n0", "n0"]


def test_servers_share_the_ranks_gpus_where_there_are_no_others() -> None:
    """Four ranks on two nodes of two GPUs: no GPU is left for a server."""
    a, b = nodes(2)
    ranks = gpus((a, "0"), (a, "1"), (b, "4"), (b, "5"))
    slots = server_slots(CUDA, [a, b], ranks, 3, 2)
    assert all(slot.shared and len(slot.parts) == 1 for slot in slots)
    assert [(slot.parts[0].node.name, slot.parts[0].devices) for slot in slots] == [
        ("n0", ("0", "1")),
        ("n1", ("4", "5")),
        ("n0", ("0", "1")),
    ]
    assert slots[1].parts[0].env == {"CUDA_VISIBLE_DEVICES": "4,5"}


def test_a_server_larger_than_a_node_has_a_part_on_each() -> None:
    a, b = nodes(2)
    [slot] = server_slots(CUDA, [a, b], gpus((a, "0"), (a, "1"), (b, "0"), (b, "1")), 1, 4)
    assert [(part.node.name, part.devices) for part in slot.parts] == [("n0", ("0", "1")), ("n1", ("0", "1"))]


def test_ranks_are_apart_from_servers_on_other_devices() -> None:
    a, b = nodes(2)
    policy, critic = gpus((a, "0"), (a, "1")), gpus((b, "0"), (b, "1"))
    on_first = server_slots(CUDA, [a, b], [*policy, *critic], 2, 1)
    assert not share_no_device(policy, on_first) and share_no_device(critic, on_first)
    assert not share_no_device(critic, server_slots(CUDA, [a, b], [*policy, *critic], 2, 2))
    assert share_no_device([slot_on(a)], server_slots(get_platform("cpu"), [a], [slot_on(a)], 1, 1))


def test_the_ranks_beside_a_server_are_those_on_its_devices_in_their_order() -> None:
    a, b = nodes(2)
    ranks = gpus((a, "0"), (a, "1"), (b, "0"), (b, "1"))
    assert ranks_beside(ranks, server_slots(CUDA, [a, b], ranks, 2, 2)) == ((0, 1), (2, 3))
    assert ranks_beside(ranks, server_slots(CUDA, [a, b], ranks, 1, 4)) == ((0, 1, 2, 3),)
    assert ranks_beside(ranks, server_slots(CUDA, [a, b], ranks, 5, 1)) == ((0,), (1,), (2,), (3,), (0,))
    # A device is another pool's; there are none.
    assert ranks_beside(ranks[:3], server_slots(CUDA, [a, b], ranks, 2, 2)) == ()
    assert ranks_beside(ranks[2:], server_slots(CUDA, [a, b], ranks, 1, 2)) == ()
    assert ranks_beside([slot_on(a)], server_slots(get_platform("cpu"), [a], [slot_on(a)], 1, 1)) == ()


@pytest.mark.parametrize(
    ("size", "reason"), [(3, "no multiple"), (8, "fit neither beside the ranks nor on their 3 devices")]
)
def test_servers_that_fit_nowhere_are_refused(size: int, reason: str) -> None:
    a, b = nodes(2)
    with pytest.raises(UserError, match=reason):
        server_slots(CUDA, [a, b], gpus((a, "0"), (a, "1"), (b, "0")), 1, size)


def test_uneven_parts_are_refused() -> None:
    a, b, c = nodes(3)
    ranks = gpus((a, "0"), (a, "1"), (b, "0"), (c, "0"), (c, "1"))
    with pytest.raises(UserError, match=r"uneven parts: 2 on n0 \(10\.0\.0\.0\), 1 on n1 .*, 1 on n2"):
        server_slots(CUDA, [a, b, c], ranks, 1, 4)


def test_devices_of_which_nothing_is_heard_are_told_and_are_no_trace_of_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the first Python of a node takes minutes to start, from a file system that all of them read."""

    def silent(*_: Any, timeout: float) -> Any:
        raise GetTimeoutError(f"not within {timeout} s")

    call = SimpleNamespace(remote=lambda: None)
    asked = SimpleNamespace(options=lambda **_: call)
    monkeypatch.setattr("megarl.cluster.slots.ray", SimpleNamespace(remote=lambda _: asked, get=silent))
    group: Any = SimpleNamespace(bundle_specs=[{"GPU": 2.0}])
    with pytest.raises(DeadlineError, match=r"on each of 3 x 2 devices \(GPU\) within 60 s"):
        _devices(CUDA, group, 3)


@pytest.mark.slow
def test_a_run_on_one_machine_has_a_seat_a_device_on_its_loopback(runtime: Runtime) -> None:
    assert len(runtime.slots) == (num_local_devices(runtime.platform) or 4)
    assert {slot.node for slot in runtime.slots} == {runtime.here}
    assert runtime.address_of(runtime.here) == "127.0.0.1"
    assert runtime.process("x").address == "127.0.0.1"
