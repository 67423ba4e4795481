"""A peer that answers, one that is not there, one that is silent, and one that garbles."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator

import pytest

from megarl.cluster.network import PROBE_BYTES, Echo, interface_of, own_address, probe, probe_all
from megarl.core.errors import MegarlError

HERE = "127.0.0.1"


@pytest.fixture
def echo() -> Echo:
    return Echo(HERE)


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    with socket.create_server((HERE, 0)) as listener:
        yield listener


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_interface_of_an_address() -> None:
    assert interface_of(HERE) == "lo"
    assert interface_of("203.0.113.9") == ""


def test_an_echo_answers_again_and_again(echo: Echo) -> None:
    assert [probe(HERE, echo.port, 5.0) for _ in range(3)] == ["", "", ""]


def test_a_nodes_own_address_is_the_one_on_its_way_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Routed(socket.socket):
        def connect(self, where: tuple[str, int]) -> None:
            assert where[0] == "203.0.113.1"
            super().connect(("127.0.0.1", 9))

    monkeypatch.setattr("megarl.cluster.network.socket.socket", Routed)
    assert own_address() == "127.0.0.1"
    monkeypatch.setattr(Routed, "connect", no_route)
    with pytest.raises(MegarlError, match=r"no way to any \(Network is unreachable\)\. Set agent\.listen to loopback"):
        own_address()


def no_route(self: socket.socket, where: object) -> None:
    raise OSError(errno.ENETUNREACH, "Network is unreachable")


def test_nobody_listens() -> None:
    with socket.create_server((HERE, 0)) as listener:
        port = port_of(listener)
    assert "refused" in probe(HERE, port, 5.0)


def test_a_silent_peer_is_given_up(silent: socket.socket) -> None:
    assert probe(HERE, port_of(silent), 0.2) == "no answer within 0.2 s"


@pytest.mark.parametrize("answer", [b"", b"x" * 10, b"x" * PROBE_BYTES])
def test_other_bytes_are_no_answer(silent: socket.socket, answer: bytes) -> None:
    def reply() -> None:
        peer, _ = silent.accept()
        with peer:
            received = 0
            while received < PROBE_BYTES:
                received += len(peer.recv(PROBE_BYTES))
            peer.sendall(answer)

    thread = threading.Thread(target=reply)
    thread.start()
    assert f"{len(answer)} of {PROBE_BYTES} bytes came back" in probe(HERE, port_of(silent), 5.0)
    thread.join()


def test_peers_are_probed_side_by_side_and_told_apart(echo: Echo, silent: socket.socket) -> None:
    peers = [(HERE, echo.port), (HERE, port_of(silent)), (HERE, echo.port)]
    assert probe_all(peers, 2.0) == ["", "no answer within 2 s", ""]
    assert probe_all([], 0.3) == []
