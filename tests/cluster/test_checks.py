"""What nodes have to have in common, each difference named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.checks import (
    Broken,
    NodeFacts,
    check_clocks,
    check_interfaces,
    check_links,
    check_paths,
    check_versions,
    clock_diff,
    describe_devices,
    describe_lost,
)
from megarl.core.errors import MegarlError, UserError


def node(index: int, **changes: Any) -> NodeFacts:
    settings: dict[str, Any] = {
        "name": f"n{index}",
        "address": f"10.0.0.{index}",
        "interface": "eth0",
        "port": 1,
        "temp": Path("/tmp"),
        "versions": {"torch": "2.0", "python": "3.11.9"},
        "missing": (),
    }
    return NodeFacts(**(settings | changes))


def test_equal_nodes_pass() -> None:
    same = [node(1), node(2)]
    check_interfaces(same)
    check_versions(same)
    check_paths(same)
    check_links([])


def test_every_differing_version_is_named_with_both_nodes() -> None:
    nodes = [node(1), node(2, versions={"torch": "2.1", "python": "3.11.9"}), node(3, versions={"python": "3.12.0"})]
    with pytest.raises(UserError) as caught:
        check_versions(nodes)
    lines = str(caught.value).splitlines()
    assert "  torch: 2.1 on n2 (10.0.0.2), 2.0 on n1 (10.0.0.1)" in lines
    assert "  torch: None on n3 (10.0.0.3), 2.0 on n1 (10.0.0.1)" in lines
    assert "  python: 3.12.0 on n3 (10.0.0.3), 3.11.9 on n1 (10.0.0.1)" in lines
    assert not any(line.startswith("  python") and "n2" in line for line in lines)


def test_an_address_on_no_interface_is_named() -> None:
    with pytest.raises(UserError, match=r"n2 joined Ray as 10\.0\.0\.2, and none of its network interfaces"):
        check_interfaces([node(1), node(2, interface="")])


def test_paths_that_are_not_there_are_named_with_the_node() -> None:
    with pytest.raises(UserError, match=r"/runs/x is not on n2 \(10\.0\.0\.2\)"):
        check_paths([node(1), node(2, missing=(Path("/runs/x"),))])


@pytest.mark.parametrize(
    ("sent", "remote", "received", "ahead"),
    [
        (100.0, 100.5, 101.0, 0.0),  # within the time that the call took
        (100.0, 111.0, 101.0, 10.0),
        (100.0, 90.0, 101.0, -10.0),
        (100.0, 101.0, 101.0, 0.0),
    ],
)
def test_the_way_there_and_back_is_not_taken_for_a_difference_of_clocks(
    sent: float, remote: float, received: float, ahead: float
) -> None:
    assert clock_diff(sent, remote, received) == pytest.approx(ahead)


def test_clocks_over_five_seconds_apart_are_refused() -> None:
    check_clocks({"n2": 4.9, "n3": -5.0})
    with pytest.raises(UserError, match="n3 is 61 s behind") as caught:
        check_clocks({"n2": 4.9, "n3": -61.0})
    assert "n2" not in str(caught.value)


def test_broken_links_name_both_ends_and_only_some_are_shown() -> None:
    with pytest.raises(MegarlError, match=r"n1 \(a\) cannot reach n2 \(b\) on interface eth0: no answer"):
        check_links([Broken("n1 (a)", "n2 (b)", "eth0", "no answer")])
    with pytest.raises(MegarlError, match="and 4 more"):
        check_links([Broken(f"n{index}", "n0", "eth0", "no answer") for index in range(1, 13)])


def test_missing_devices_are_counted_by_node_and_lost_nodes_say_why() -> None:
    text = describe_devices(8, "GPU", {"n1": 4.0, "n2": 0.0}, {"n3": "health check failed"})
    assert "needs 8 devices (GPU), and 4 are there" in text
    assert "n1: 4, n2: 0" in text and "n3 was here and is lost: health check failed" in text
    assert describe_lost({"n3": "gone"}).endswith("n3: gone")
