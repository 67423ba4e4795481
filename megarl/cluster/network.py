"""What the nodes of a run need to know of their network: the interface of an address, and whether peers can be reached.

Plain TCP: what this says is true before Ray, gloo or NCCL has said a word. Not for traffic of the run.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil

from megarl.core.errors import MegarlError

# More than one packet: a path that only lets small ones pass is broken, too.
PROBE_BYTES = 8192
ELSEWHERE = "203.0.113.1"  # nobody's (RFC 5737): it is what a default route leads to
MAX_PROBES = 64  # side by side


def interface_of(address: str) -> str:
    """Name of this node's network interface that holds the address; empty where none does."""
    for name, held in psutil.net_if_addrs().items():
        if any(each.family in (socket.AF_INET, socket.AF_INET6) and each.address == address for each in held):
            return name
    return ""


def address_towards(hosts: Sequence[str]) -> str:
    """This node's address as the first of these hosts sees it that is another machine's, perhaps; empty where all are loopback.

    Nothing is sent. Raises OSError: a name without an address, no way there.
    """
    for host in hosts:
        kind, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        if not ipaddress.ip_address(str(where[0]).partition("%")[0]).is_loopback:
            with socket.socket(kind, socket.SOCK_DGRAM) as way:
                way.connect(where)
                return str(way.getsockname()[0])
    return ""


def own_address() -> str:
    """This node's address on its way to other machines. Raises MegarlError where it has none."""
    try:
        return address_towards([ELSEWHERE])
    except OSError as error:
        raise MegarlError(
            f"This node has no address at which others could reach it: there is no way to any ({error.strerror}). Set "
            "agent.listen to loopback, or give the node a network."
        ) from error


class Echo:
    """Listens on one address, on a port of its own, and sends back what it gets; from a thread that ends with the process."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), backlog=256)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._listen, daemon=True, name="echo").start()

    def _listen(self) -> None:
        while True:
            peer, _ = self._listener.accept()
            threading.Thread(target=_answer, args=(peer,), daemon=True).start()


def _answer(peer: socket.socket) -> None:
    with peer:
        peer.settimeout(60.0)
        try:
            while data := peer.recv(PROBE_BYTES):
                peer.sendall(data)
        except OSError:
            return  # the peer has given up


def probe(address: str, port: int, timeout_s: float) -> str:
    """Send some kilobytes to an Echo and have them back; returns what went wrong, or nothing."""
    sent, back = secrets.token_bytes(PROBE_BYTES), b""
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as peer:
            peer.sendall(sent)
            while len(back) < PROBE_BYTES and (data := peer.recv(PROBE_BYTES)):
                back += data
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return str(error)
    return "" if back == sent else f"{len(back)} of {PROBE_BYTES} bytes came back, or others than were sent"


def probe_all(peers: Sequence[tuple[str, int]], timeout_s: float) -> list[str]:
    """`probe` every peer, side by side; what went wrong, in their order."""
    with ThreadPoolExecutor(max_workers=min(MAX_PROBES, len(peers)) or 1) as pool:
        return list(pool.map(lambda peer: probe(peer[0], peer[1], timeout_s), peers))
