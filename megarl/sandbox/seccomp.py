"""The system calls that a sandbox may not make, as a program for the kernel's filter (seccomp-BPF).

The rest is allowed: Python and its libraries use more than 200. What is refused here are doors: calls that reach other
processes, mounts, new namespaces, the kernel's own insides, and memory that nobody counts. `clone3` has its flags where a
filter cannot look, and is answered as a kernel without it would, so that the C library takes `clone`.
Sources: linux/seccomp.h, linux/filter.h, linux/audit.h, and the tables of system calls of both machines.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from dataclasses import dataclass

from megarl.core.errors import UserError

ALLOW, ERRNO, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCH_AT, FIRST_ARGUMENT_AT, SECOND_ARGUMENT_AT = 0, 4, 16, 24
X32_NUMBERS = 0x40000000  # the calls of a second interface of the same machine begin here
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX: write into the input of a terminal

# name: number on x86_64, number on aarch64 (None: it has none)
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # mounts and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    # the kernel
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "personality": (135, 92),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # memory outside of what is counted: in no file of the sandbox, and in no process's resident set
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}


@dataclass(frozen=True)
class Machine:
    """A machine's numbers. column: of the table above. x32: it has a second interface, which is shut."""

    arch: int
    column: int
    clone: int
    socket: int
    ioctl: int
    x32: bool


CLONE3 = 435
MACHINES = {
    "x86_64": Machine(arch=0xC000003E, column=0, clone=56, socket=41, ioctl=16, x32=True),
    "aarch64": Machine(arch=0xC00000B7, column=1, clone=220, socket=198, ioctl=29, x32=False),
}

Instruction = tuple[int, int, int, int]  # code, steps to jump if true, if false, constant


def program(name: str | None = None) -> bytes:
    """The filter for a machine, as `bwrap --seccomp` reads it. name: as `uname -m` says it; None is this one.

    Raises UserError: a machine whose numbers are not known.
    """
    name = name or platform.machine()
    if name not in MACHINES:
        raise UserError(
            f"sandboxes know the system calls of {' and '.join(MACHINES)}; this machine is {name}. Run what needs them elsewhere."
        )
    return b"".join(struct.pack("=HBBI", *each) for each in instructions(MACHINES[name]))


def instructions(machine: Machine) -> list[Instruction]:
    """The filter, from its first instruction to its last."""
    found: list[Instruction] = [
        (LOAD, 0, 0, ARCH_AT),
        (JUMP_EQUAL, 1, 0, machine.arch),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER_AT),
    ]
    if machine.x32:
        found += [(JUMP_AT_LEAST, 0, 1, X32_NUMBERS), (RETURN, 0, 0, KILL_PROCESS)]
    found += _refuse(CLONE3, errno.ENOSYS)
    for numbers in REFUSED.values():
        number = numbers[machine.column]
        if number is not None:
            found += _refuse(number, errno.EPERM)
    # A new process may have no new namespaces, a socket no family but AF_UNIX.
    found += _look(machine.clone, FIRST_ARGUMENT_AT, [(JUMP_ANY_BIT, 0, 1, NEW_NAMESPACES)], errno.EPERM)
    found += _look(machine.socket, FIRST_ARGUMENT_AT, [(JUMP_EQUAL, 1, 0, socket.AF_UNIX)], errno.EAFNOSUPPORT)
    for request in TERMINAL_INPUT:
        found += _look(machine.ioctl, SECOND_ARGUMENT_AT, [(JUMP_EQUAL, 0, 1, request)], errno.EPERM)
    return [*found, (RETURN, 0, 0, ALLOW)]


def _refuse(number: int, code: int) -> list[Instruction]:
    return [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | code)]


def _look(number: int, at: int, test: list[Instruction], code: int) -> list[Instruction]:
    """Refuse a call where the test of one argument does not jump over the refusal; afterwards the number is loaded again."""
    inside = [(LOAD, 0, 0, at), *test, (RETURN, 0, 0, ERRNO | code), (LOAD, 0, 0, NUMBER_AT)]
    return [(JUMP_EQUAL, 0, len(inside), number), *inside]
