"""Ports that are free, and why there is none."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from megarl.core.errors import MegarlError
from megarl.core.ports import PORT_TRIES, free_port, kept_port


@pytest.mark.parametrize("host", ["203.0.113.9", "no-such-host.invalid"])
def test_an_address_that_is_not_this_hosts_is_no_taken_port(host: str) -> None:
    """203.0.113.0/24 is for documentation (RFC 5737): nobody has such an address."""
    with pytest.raises(MegarlError, match=f"cannot listen on the address {host}: .+ip address"):
        free_port(host)


@pytest.mark.parametrize("code", [errno.EADDRINUSE, errno.EACCES])
def test_a_port_that_is_taken_is_passed_over(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    class Taken(socket.socket):
        def bind(self, address: Any) -> None:
            tried.append(address[1])
            if len(tried) < 3:
                raise OSError(code, "no")
            super().bind(address)

    monkeypatch.setattr("megarl.core.ports.socket.socket", Taken)
    with kept_port("127.0.0.1") as kept:
        assert kept.getsockname()[1] == tried[2]
    monkeypatch.setattr(Taken, "bind", lambda self, address: (_ for _ in ()).throw(OSError(code, "no")))
    with pytest.raises(MegarlError, match=f"No free port was found on 127.0.0.1 in {PORT_TRIES} tries"):
        free_port()
