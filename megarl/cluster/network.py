"""What the nodes of a run need to know of their network: the interface of an address, and whether peers can be reached."""

from __future__ import annotations

import socket

import psutil

# For the processes that `ray start` starts: a node that cannot be reached is given up after some 20 seconds, not 64.
RAY_HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}


def interface_of(address: str) -> str:
    """Name of this node's network interface that holds the address; empty where none does."""
    for name, held in psutil.net_if_addrs().items():
        if any(each.family in (socket.AF_INET, socket.AF_INET6) and each.address == address for each in held):
            return name
    return ""
