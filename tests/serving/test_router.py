"""What is made of a router that does not answer as it should."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.cluster.server_actors import RouterActor
from megarl.core.errors import MegarlError
from megarl.serving.client import ServerEndpoint
from megarl.serving.router import RouterProcess, RouterSpec
from megarl.serving.server import ProcessPlace

SERVER = ServerEndpoint("server 0", "http://127.0.0.1:1", "key")


@contextmanager
def answering(said: bytes) -> Iterator[int]:
    """A port where each request is answered with these bytes, and the connection closed."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return  # closed
                with connection:
                    asked = b""
                    while not asked.endswith(b"}"):  # of the whole body
                        asked += connection.recv(2**16)
                    connection.sendall(said)

        threading.Thread(target=serve, daemon=True).start()
        yield int(listening.getsockname()[1])
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (b"", "closed connection without response"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n{"workers', "IncompleteRead"),
        (b"HTTP/1.1 500 Sorry\r\nContent-Length: 200\r\n\r\nwhy", "IncompleteRead"),
    ],
)
def test_one_that_dies_while_it_answers_is_an_error_of_ours(tmp_path: Path, said: bytes, shown: str) -> None:
    """Whoever watches it starts it again; what comes out of Python's HTTP client would end the run."""
    with answering(said) as port:
        router = RouterProcess(RouterSpec(port=port), ProcessPlace(tmp_path, "key"))
        with pytest.raises(MegarlError, match=f"router POST /workers: .*{shown}"):
            router.add(SERVER)


def test_a_routers_ports_are_its_own_until_it_listens(tmp_path: Path) -> None:
    """It takes a second to start: a router ended because another process had taken its port meanwhile."""
    router = RouterProcess(RouterSpec(), ProcessPlace(tmp_path, "key"))
    flags = router.command.argv
    ports = [int(flags[flags.index(name) + 1]) for name in ("--port", "--prometheus-port")]
    for port in ports:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
    router.start()
    try:
        router.wait_ready(60)
        assert router.workers() == {}
    finally:
        router.stop()
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


DYING = """
import socket, time
with socket.create_server(("127.0.0.1", {port})) as listening:
    print("up", flush=True)
    while True:
        listening.accept()[0].close()
        if {ends}:
            break
time.sleep(0.3)
"""


@pytest.mark.parametrize("ends", [True, False])
def test_no_server_is_to_blame_where_the_router_ends(tmp_path: Path, *, ends: bool) -> None:
    """The kernel closes a process's connections before it has ended."""
    router = RouterProcess(RouterSpec(), ProcessPlace(tmp_path, "key"))
    source = DYING.format(port=router.command.endpoint.port, ends=ends)
    router.command = replace(router.command, argv=(sys.executable, "-c", source))
    actor = RouterActor.__new__(RouterActor)
    actor._router = router
    router.start()
    try:
        while "up" not in router.log_tail():
            time.sleep(0.01)
        trouble = asyncio.run(actor.add(SERVER))
        assert trouble == "" if ends else "/workers: " in trouble
    finally:
        router.stop(0.1)
