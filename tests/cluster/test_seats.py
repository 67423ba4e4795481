"""Who sits where: by node and device; servers beside the ranks where there is room."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megarl.cluster.nodes import Node
from megarl.cluster.runtime import Runtime
from megarl.cluster.seats import Seat, apart, beside, seat_on, seat_servers
from megarl.core.errors import UserError
from megarl.core.platform import get_platform

CUDA = get_platform("cuda")


def nodes(count: int) -> list[Node]:
    return [Node(f"n{index}", f"10.0.0.{index}", f"{index:056x}", Path("/tmp"), devices=2) for index in range(count)]


def names(seats: Sequence[Seat]) -> list[str]:
    return [seat.node.name for seat in seats]


def gpus(*places: tuple[Node, str]) -> list[Seat]:
    return [Seat(node, (device,), {}) for node, device in places]


def test_servers_are_dealt_to_nodes_without_ranks() -> None:
    made = nodes(4)
    ranks = [seat_on(made[0]), seat_on(made[1]), seat_on(made[1])]
    assert names(beside(made, ranks, 3)) == ["n2", "n3", "n2"]


def test_servers_share_nodes_with_ranks_where_there_is_no_other() -> None:
    made = nodes(2)
    assert names(beside(made, [seat_on(each) for each in made], 3)) == ["n0", "n1", "n0"]
    assert names(beside(made[:1], [], 2)) == ["n0", "n0"]


def test_servers_share_the_ranks_gpus_where_there_are_no_others() -> None:
    """Four ranks on two nodes of two GPUs: no GPU is left for a server."""
    a, b = nodes(2)
    ranks = gpus((a, "0"), (a, "1"), (b, "4"), (b, "5"))
    seats = seat_servers(CUDA, [a, b], ranks, 3, 2)
    assert all(seat.shared and len(seat.parts) == 1 for seat in seats)
    assert [(seat.parts[0].node.name, seat.parts[0].devices) for seat in seats] == [
        ("n0", ("0", "1")),
        ("n1", ("4", "5")),
        ("n0", ("0", "1")),
    ]
    assert seats[1].parts[0].env == {"CUDA_VISIBLE_DEVICES": "4,5"}


def test_a_server_larger_than_a_node_has_a_part_on_each() -> None:
    a, b = nodes(2)
    [seat] = seat_servers(CUDA, [a, b], gpus((a, "0"), (a, "1"), (b, "0"), (b, "1")), 1, 4)
    assert [(part.node.name, part.devices) for part in seat.parts] == [("n0", ("0", "1")), ("n1", ("0", "1"))]


def test_ranks_are_apart_from_servers_on_other_devices() -> None:
    a, b = nodes(2)
    policy, critic = gpus((a, "0"), (a, "1")), gpus((b, "0"), (b, "1"))
    on_first = seat_servers(CUDA, [a, b], [*policy, *critic], 2, 1)
    assert not apart(policy, on_first) and apart(critic, on_first)
    assert not apart(critic, seat_servers(CUDA, [a, b], [*policy, *critic], 2, 2))
    assert apart([seat_on(a)], seat_servers(get_platform("cpu"), [a], [seat_on(a)], 1, 1))


@pytest.mark.parametrize(
    ("size", "reason"), [(3, "no multiple"), (8, "fit neither beside the ranks nor on their 3 devices")]
)
def test_servers_that_fit_nowhere_are_refused(size: int, reason: str) -> None:
    a, b = nodes(2)
    with pytest.raises(UserError, match=reason):
        seat_servers(CUDA, [a, b], gpus((a, "0"), (a, "1"), (b, "0")), 1, size)


def test_uneven_parts_are_refused() -> None:
    a, b, c = nodes(3)
    ranks = gpus((a, "0"), (a, "1"), (b, "0"), (c, "0"), (c, "1"))
    with pytest.raises(UserError, match=r"uneven parts: 2 on n0 \(10\.0\.0\.0\), 1 on n1 .*, 1 on n2"):
        seat_servers(CUDA, [a, b, c], ranks, 1, 4)


@pytest.mark.slow
def test_a_run_on_one_machine_has_a_seat_a_device_on_its_loopback(runtime: Runtime) -> None:
    assert len(runtime.seats) == 4
    assert {seat.node for seat in runtime.seats} == {runtime.here}
    assert runtime.address_of(runtime.here) == "127.0.0.1"
    assert runtime.process("x").address == "127.0.0.1"
