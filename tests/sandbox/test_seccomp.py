"""The filter, followed by an interpreter of its own: what the kernel would say of each call, on both machines."""

from __future__ import annotations

import errno
import socket
import struct

import pytest

from megarl.core.errors import UserError
from megarl.sandbox.seccomp import (
    ALLOW,
    CLONE3,
    ERRNO,
    KILL_PROCESS,
    MACHINES,
    REFUSED,
    Machine,
    instructions,
    program,
)


def verdict(machine: Machine, number: int, *words: int, arch: int | None = None) -> int:
    """What the filter returns for a call (linux/filter.h): 0x20 loads, 0x?5 jump, 0x06 returns."""
    data = struct.pack("=IIQ6Q", number, machine.arch if arch is None else arch, 0, *words, *[0] * (6 - len(words)))
    steps, at, held = instructions(machine), 0, 0
    while True:
        code, if_true, if_false, constant = steps[at]
        at += 1
        if code == 0x20:
            [held] = struct.unpack_from("=I", data, constant)
        elif code == 0x06:
            return constant
        else:
            true = {0x15: held == constant, 0x35: held >= constant, 0x45: bool(held & constant)}[code]
            at += if_true if true else if_false


@pytest.fixture(params=list(MACHINES))
def machine(request: pytest.FixtureRequest) -> Machine:
    return MACHINES[request.param]


def test_what_is_in_the_table_is_refused_and_nothing_else(machine: Machine) -> None:
    refused = {each[machine.column] for each in REFUSED.values()} - {None}
    looked_at = {machine.clone, machine.socket, machine.ioctl, CLONE3}
    assert not refused & looked_at
    for number in range(600):
        if number not in looked_at:
            assert verdict(machine, number) == (ERRNO | errno.EPERM if number in refused else ALLOW), number


def test_arguments_are_looked_at(machine: Machine) -> None:
    eperm = ERRNO | errno.EPERM
    assert verdict(machine, machine.clone, 0x01200011) == ALLOW  # what fork() is
    assert verdict(machine, machine.clone, 0x003D0F00) == ALLOW  # what a thread is
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, machine.clone, flag | 17) == eperm
    assert verdict(machine, CLONE3) == ERRNO | errno.ENOSYS
    assert verdict(machine, machine.socket, socket.AF_UNIX) == ALLOW
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET, 40):
        assert verdict(machine, machine.socket, family) == ERRNO | errno.EAFNOSUPPORT
    assert verdict(machine, machine.ioctl, 0, 0x5401) == ALLOW  # whether it is a terminal
    assert verdict(machine, machine.ioctl, 0, 0x5412) == verdict(machine, machine.ioctl, 0, 0x541C) == eperm


def test_other_interfaces_of_the_machine_are_shut(machine: Machine) -> None:
    assert verdict(machine, 1, arch=0x40000003) == KILL_PROCESS
    if machine.x32:
        assert verdict(machine, 0x40000001) == KILL_PROCESS


def test_it_is_written_as_the_kernel_reads_it() -> None:
    found = program("x86_64")
    assert found[:8] == struct.pack("=HBBI", 0x20, 0, 0, 4)
    assert len(found) == 8 * len(instructions(MACHINES["x86_64"])) < 4096  # a pipe's least


def test_a_machine_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UserError, match="this machine is riscv64"):
        program("riscv64")
