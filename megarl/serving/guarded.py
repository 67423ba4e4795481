"""Runs a command that must not outlive its parent: asks the kernel for SIGKILL when the parent ends, then becomes it.

Run as a file with `python -I -S`: it needs only the standard library and is replaced by the command within
milliseconds. The kernel's order survives exec. It is tied to the *thread* that started this process: start processes
from a thread that lives as long as they should.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """`guarded.py PARENT COMMAND...`. PARENT: its pid, or the variable that has it: then signals that are held back stay so."""
    parent, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != int(parent if parent.isdigit() else os.environ[parent]):
        sys.exit("The parent ended before this process was guarded.")
    if parent.isdigit():
        # Ray's processes hold them back (cluster/runtime); what this one starts may end its own children by them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP, signal.SIGUSR1})
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
