"""TCP ports for what megarl starts: free now, or kept until their listener is there.

Outside of the kernel's ephemeral range, whose ports go to anybody who connects somewhere.
"""

from __future__ import annotations

import errno
import secrets
import socket
from pathlib import Path

from megarl.core.errors import MegarlError

EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT = 20000
PORT_TRIES = 100
TAKEN = (errno.EADDRINUSE, errno.EACCES)  # with another port it may go well: some are not for everybody


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free on this address now, and that the kernel gives to nobody who does not ask for it by number."""
    with _bound(host) as probe:
        return int(probe.getsockname()[1])


def kept_port(host: str) -> socket.socket:
    """A socket on such a port, for whom it is kept until the socket is closed: a server binds its port only seconds later.

    Meanwhile it is free for those alone who bind it with SO_REUSEADDR, as servers do, and taken for `free_port` and this.
    """
    kept = _bound(host)
    # Not before: two that both have it may bind the same port.
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return kept


def _bound(host: str) -> socket.socket:
    """Bound, and not listening. Ephemeral ports could go to anybody meanwhile.

    Raises MegarlError: no free port, or an address that this host cannot listen on.
    """
    first_ephemeral = int(EPHEMERAL_PORTS.read_text().split()[0])
    for _ in range(PORT_TRIES):
        # Ray's workers take ports below the first of these.
        wanted = secrets.randbelow(first_ephemeral - FIRST_PORT) + FIRST_PORT if first_ephemeral > FIRST_PORT else 0
        probe = socket.socket()
        try:
            probe.bind((host, wanted))
        except OSError as error:
            probe.close()
            if error.errno not in TAKEN:
                raise MegarlError(
                    f"This host cannot listen on the address {host}: {error.strerror}. Wanted is an address of one of its "
                    "network interfaces, or a name that stands for one; see `ip address`, and the host's line in /etc/hosts."
                ) from error
        else:
            return probe
    raise MegarlError(f"No free port was found on {host} in {PORT_TRIES} tries from {FIRST_PORT} to {first_ephemeral}.")
