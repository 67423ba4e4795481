"""What is made of what nodes and links say; the nodes themselves are in tests/end_to_end/test_several_nodes.py."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster import nodes
from megarl.cluster.checks import Broken
from megarl.cluster.node_actor import GONE
from megarl.cluster.nodes import Node, Nodes, _natural, await_devices, without_spares
from megarl.core.errors import MegarlError, UserError
from megarl.core.ray_env import RAY_NODES_VARIABLE

LINK = Broken("a", "b", "eth0", "no answer")
OTHER = Broken("b", "c", "eth0", "no answer")


class Scripted(Nodes):
    """Nodes whose links are broken as the test says, look by look."""

    def __init__(self, *looks: list[Broken]) -> None:
        super().__init__()
        self.looks = list(looks)

    def broken(self) -> list[Broken]:
        return self.looks.pop(0)


@pytest.mark.parametrize(
    ("looks", "certain"),
    [
        ([[]], []),
        ([[LINK], []], []),
        ([[LINK], [OTHER]], []),
        ([[LINK, OTHER], [Broken("a", "b", "eth0", "refused")]], [Broken("a", "b", "eth0", "refused")]),
    ],
)
def test_a_link_is_broken_where_two_looks_say_so(looks: list[list[Broken]], certain: list[Broken]) -> None:
    scripted = Scripted(*looks)
    assert scripted.broken_for_certain() == certain
    assert scripted.looks == []


def test_a_run_on_one_machine_has_no_links_and_loses_no_nodes() -> None:
    assert Nodes().broken() == [] and Nodes().lost() == {}


def test_a_signal_reaches_a_process_of_this_machine_or_says_that_it_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    assert Nodes().signal("127.0.0.1", process.pid, signal.SIGKILL) == ""
    assert process.wait(5) == -signal.SIGKILL
    assert Nodes().signal("127.0.0.1", process.pid, signal.SIGKILL) == GONE


def test_a_node_that_cannot_be_cleaned_does_not_hide_what_the_run_ended_with(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise MegarlError("A node's own actor failed: no space")

    monkeypatch.setattr("megarl.cluster.nodes._ask", fails)
    Nodes().clean()
    assert "could not look after all nodes in the end: A node's own actor failed: no space" in caplog.text


def test_addresses_are_in_the_order_of_numbers() -> None:
    addresses = ["10.0.0.10", "10.0.0.9", "node-b", "10.0.0.2"]
    assert sorted(addresses, key=_natural) == ["node-b", "10.0.0.2", "10.0.0.9", "10.0.0.10"]


def test_a_node_that_cannot_get_what_the_hub_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"1": "", "2": "HF_HUB_OFFLINE is set"}
    fetching = SimpleNamespace(fetch=SimpleNamespace(remote=lambda paths: paths))
    actors, names = dict.fromkeys(answers, fetching), {"1": "one (10.0.0.1)", "2": "two (10.0.0.2)"}
    asked = []

    def ask(calls: Any, timeout_s: float, tell: Any) -> tuple[dict[str, str], dict[str, str]]:
        asked.append(calls)
        return answers, {}

    monkeypatch.setattr(nodes, "_ask", ask)
    nodes._fetch(actors, names, [])
    assert asked == []
    with pytest.raises(UserError) as refusal:
        nodes._fetch(actors, names, [Path("/home/models--a--b/snapshots/c")])
    assert "two (10.0.0.2): HF_HUB_OFFLINE is set" in str(refusal.value) and "one" not in str(refusal.value)
    answers["2"] = ""
    nodes._fetch(actors, names, [Path("/home/models--a--b/snapshots/c")])


def test_nodes_that_still_download_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = [["a", "b"], ["b"], []]
    monkeypatch.setattr(nodes.ray, "wait", lambda refs, num_returns, timeout: ([], looks.pop(0)))
    monkeypatch.setattr(nodes.ray, "get", lambda ref: "")
    actors = {key: SimpleNamespace(fetch=SimpleNamespace(remote=lambda paths, key=key: key)) for key in "ab"}
    nodes._fetch(actors, {"a": "one (10.0.0.1)", "b": "two (10.0.0.2)"}, [Path("/home/models--a--b/snapshots/c")])
    said = [record.getMessage() for record in caplog.records]
    assert [line.rpartition(": ")[2] for line in said] == ["one (10.0.0.1), two (10.0.0.2)", "two (10.0.0.2)"]
    assert said[0].startswith("waiting for nodes to get what the hub has, since 0 s"), (
        "by the clock, which is not waited for"
    )


def test_what_is_asked_of_nodes_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(refs: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        waits.append(timeout)
        time.sleep(min(timeout, 0.02))
        return refs[:1], refs[1:]

    monkeypatch.setattr(nodes.ray, "wait", wait)
    monkeypatch.setattr(nodes.ray, "get", lambda ref: f"{ref} said")
    assert nodes._ask({}, 1.0) == ({}, {}) and waits == []
    assert nodes._ask({"1": "a", "2": "b"}, 0.01) == ({"1": "a said"}, {"2": "no answer within 0.01 s"})


def of_ray(monkeypatch: pytest.MonkeyPatch, *alive: bool) -> list[Node]:
    """Nodes of Ray's, with two devices each: those that live."""
    rows = [{"NodeManagerAddress": f"10.0.0.{at}", "Alive": lives} for at, lives in enumerate(alive)]
    monkeypatch.setattr(nodes, "ray", SimpleNamespace(nodes=lambda: rows))
    return [Node(f"n{at}", f"10.0.0.{at}", str(at), Path("/tmp"), 2) for at, lives in enumerate(alive) if lives]


def names(found: tuple[Node, ...]) -> list[str]:
    return [node.name for node in found]


def test_a_spare_is_left_alone_until_a_node_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    there = of_ray(monkeypatch, True, True, True, True)
    assert names(without_spares(there, 4, 0)) == ["n0", "n1", "n2", "n3"]
    taken = without_spares(there, 4, 2)
    assert names(taken) == ["n0", "n1"]
    run = Nodes(taken)
    left = of_ray(monkeypatch, True, False, True, True)
    assert run.replaceable() and names(without_spares(left, 4, 2)) == ["n0", "n2"]
    left = of_ray(monkeypatch, True, False, False, True)
    assert run.replaceable() and names(without_spares(left, 4, 2)) == ["n0", "n3"]
    of_ray(monkeypatch, True, False, False, False)
    assert not run.replaceable()


def test_spares_that_leave_too_few_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    there = of_ray(monkeypatch, True, True, True)
    with pytest.raises(
        UserError, match=r"cluster\.spares is 2, and the other 1 of 3 nodes have 2 devices: the run needs 4"
    ):
        without_spares(there, 4, 2)


def test_all_nodes_that_are_said_to_come_have_their_time_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' devices may be there before a node whose devices are for servers."""
    there: list[dict[str, Any]] = []

    def rows() -> list[dict[str, Any]]:
        index = len(there)
        address = {"NodeID": f"{index}", "NodeManagerHostname": f"n{index}", "NodeManagerAddress": f"10.0.0.{index}"}
        there.append({**address, "Alive": True, "Resources": {"GPU": 8.0}})
        return list(there)

    monkeypatch.setattr(nodes.ray, "nodes", rows)
    monkeypatch.setattr(nodes.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "1"))
    monkeypatch.setattr(nodes, "DEVICES_POLL_S", 0.0)
    assert [row["NodeID"] for row in await_devices("GPU", 8)] == ["0"]
    there.clear()
    monkeypatch.setenv(RAY_NODES_VARIABLE, "3")
    assert [row["NodeID"] for row in await_devices("GPU", 8)] == ["1", "0", "2"]
    there.clear()
    monkeypatch.setenv(RAY_NODES_VARIABLE, "1000000")  # they do not all come: the run goes on with what there is
    assert len(await_devices("GPU", 8, deadline_s=0.05)) > 1
