"""What has to be true of all nodes of a run together, and how it is said when it is not. Pure: whoever asks is elsewhere.

A difference between nodes would otherwise show as a hang, as a wrong number, or as an error of another node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.core.errors import MegarlError, UserError

MAX_CLOCK_DIFF_S = 5.0
SHOWN = 8  # lines of one kind in an error


@dataclass(frozen=True)
class NodeFacts:
    """What a node says of itself.

    interface: holds its address; empty where none does. port: of its Echo. temp: its folder for temporary files.
    versions: what has to be equal everywhere. missing: paths that are not there.
    """

    name: str
    address: str
    interface: str
    port: int
    temp: Path
    versions: Mapping[str, str]
    missing: tuple[Path, ...]

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(frozen=True)
class Broken:
    """A link over which one node does not reach another."""

    source: str
    target: str
    interface: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source} cannot reach {self.target} on interface {self.interface}: {self.reason}"


class BrokenLinkError(MegarlError):
    """Nodes of the run cannot reach each other: names both ends, the interface, and how it shows."""


def check_interfaces(nodes: Sequence[NodeFacts]) -> None:
    """Every node's address is on one of its interfaces. Raises UserError."""
    for node in nodes:
        if not node.interface:
            raise UserError(
                f"{node.name} joined Ray as {node.address}, and none of its network interfaces holds that address. Start "
                "Ray there with --node-ip-address set to an address of its own that the other nodes reach."
            )


def check_versions(nodes: Sequence[NodeFacts]) -> None:
    """Every node has the same software as the first, which is the driver's. Raises UserError with all differences."""
    here = nodes[0]
    lines = [
        f"{name}: {node.versions.get(name)} on {node}, {wanted} on {here}"
        for name, wanted in here.versions.items()
        for node in nodes
        if node.versions.get(name) != wanted
    ]
    if lines:
        raise UserError(
            "The nodes do not have the same software, and would not compute or speak the same:\n"
            f"{_shown(lines)}\nInstall the same on every node, or start Ray there from the same environment."
        )


def check_paths(nodes: Sequence[NodeFacts]) -> None:
    """Every node sees the folders of the run. Raises UserError."""
    lines = [f"{path} is not on {node}" for node in nodes for path in node.missing]
    if lines:
        raise UserError(
            f"Every node needs the run's folder, the model and the data:\n{_shown(lines)}\n"
            "Put them on a file system that all nodes share, under the same path."
        )


def check_clocks(diffs_s: Mapping[str, float]) -> None:
    """Clocks agree with the driver's; by node, how many seconds they are ahead at least. Raises UserError."""
    lines = [
        f"{node} is {abs(diff):.0f} s {'ahead' if diff > 0 else 'behind'}"
        for node, diff in diffs_s.items()
        if abs(diff) > MAX_CLOCK_DIFF_S
    ]
    if lines:
        raise UserError(
            f"Clocks are more than {MAX_CLOCK_DIFF_S:g} s apart from the driver's, and logs, checkpoints and files would "
            f"lie about their order:\n{_shown(lines)}\nSet them, by NTP for instance."
        )


def clock_diff(sent: float, remote: float, received: float) -> float:
    """Seconds that a remote clock is ahead for certain: what the way there and back may explain is not counted."""
    if remote > received:
        return remote - received
    return min(0.0, remote - sent)


def check_links(broken: Sequence[Broken]) -> None:
    """No link is broken. Raises BrokenLinkError."""
    if broken:
        raise BrokenLinkError(describe_links(broken))


def describe_links(broken: Sequence[Broken]) -> str:
    """For people."""
    return (
        f"The network between the nodes is broken:\n{_shown([str(each) for each in broken])}\n"
        "Look for a firewall, a wrong interface or a cable; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose another interface."
    )


def describe_lost(lost: Mapping[str, str]) -> str:
    """For people. lost: by node, why it was given up."""
    return "Ray has lost nodes of the run:\n" + _shown([f"{node}: {why}" for node, why in lost.items()])


def describe_devices(wanted: int, resource: str, there: Mapping[str, float], dead: Mapping[str, str]) -> str:
    """What is missing when not all devices came. there: by node. dead: nodes that were here, and why Ray gave them up."""
    found = ", ".join(f"{node}: {count:g}" for node, count in there.items()) or "none"
    lines = [f"{node} was here and is lost: {why}" for node, why in dead.items()]
    return (
        f"The run needs {wanted} devices ({resource}), and {sum(there.values()):g} are there. Nodes in Ray: {found}.\n"
        + _shown(lines)
    ).rstrip()


def _shown(lines: Sequence[str]) -> str:
    more = [f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join([*(f"  {line}" for line in lines[:SHOWN]), *more])
