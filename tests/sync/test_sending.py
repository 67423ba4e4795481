"""Which transport a run takes, and why: by the nodes of ranks and servers, and the memory that there is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.models.parts import first_copy
from megarl.sync.sending import MIB, Where, choose

TOGETHER = Where({"one"}, {"one"}, takes_memory=True, needed_bytes=128 * MIB, free_bytes=256 * MIB)
APART = {
    "servers are on other nodes (two) than the ranks (one)": replace(TOGETHER, servers={"one", "two"}),
    "the model's first copy are on several nodes (one, two)": replace(TOGETHER, writers={"two", "one"}),
    "/dev/shm has 64 MiB free and 128 are needed": replace(TOGETHER, free_bytes=64 * MIB),
    "rollout.quantization needs each weight whole": replace(TOGETHER, quantized=True),
    "the servers of rollout.servers.urls are not this run's own": replace(TOGETHER, servers=(), external=True),
    "devices here have memory of their own": replace(TOGETHER, takes_memory=False),
    "no rank that holds weights is on every device": replace(TOGETHER, takes_memory=False),
}


def test_memory_is_shared_where_everybody_is_on_one_node() -> None:
    assert choose("auto", TOGETHER) == ("shared_memory", "the model's first copy and all servers are on one")
    assert choose("auto", replace(TOGETHER, free_bytes=None))[0] == "shared_memory"
    assert choose("shared_memory", TOGETHER)[0] == "shared_memory"
    assert choose("broadcast", TOGETHER)[0] == "broadcast"


def test_memory_of_devices_is_shared_where_every_server_has_ranks_beside_it() -> None:
    """Over as many nodes as there are, and whatever the host's shared memory has free."""
    where = replace(TOGETHER, writers={"one", "two"}, takes_memory=False, free_bytes=0, beside=True)
    assert choose("auto", where) == ("shared_memory", "every device of a server has a rank that holds weights")
    for never in (replace(where, quantized=True), replace(where, external=True)):
        assert choose("auto", never)[0] == "broadcast"
    assert choose("disk", TOGETHER) == ("disk", "sync.transport asks for it")


@pytest.mark.parametrize("why", APART)
def test_where_it_cannot_be_shared_it_is_broadcast_or_refused(why: str) -> None:
    transport, reason = choose("auto", APART[why])
    assert transport == "broadcast" and why in reason
    with pytest.raises(UserError) as refused:
        choose("shared_memory", APART[why])
    assert why in str(refused.value) and "Set sync.transport to auto or broadcast" in str(refused.value)


def test_the_first_copy_leaves_out_the_other_copies() -> None:
    assert first_copy(Layout(tp=2, world_size=4)) == (0, 1)
    assert first_copy(Layout(pp=2, world_size=4)) == (0, 2)
    assert first_copy(Layout(ep=2, world_size=4)) == (0, 1)
