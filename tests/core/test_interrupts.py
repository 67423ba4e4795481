"""Ctrl-C, SIGTERM and SIGHUP: said at once, raised once, and a second Ctrl-C ends the process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from megarl.core.end_signals import SIGNALS
from tests.support.processes import heed_interrupts

# Takes itself apart for ever once it was interrupted; says when it begins.
STUBBORN = """
import signal, time
from megarl.core.interrupts import Interrupts
with Interrupts():
    try:
        print("up", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("down", flush=True)
        time.sleep(60)
"""


def start(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def test_the_first_is_raised_and_the_second_ends_at_once_unless_it_is_the_same() -> None:
    process = start(STUBBORN)
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "down\n"
    # A launcher sends on what the terminal has sent already; SIGTERM is not impatience either.
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=10)
    assert process.returncode == -signal.SIGINT
    assert error == "\nmegarl: SIGINT: ending everything in order (Ctrl-C again: at once)\n"


# Takes itself apart in native code, as in Ray's, from which Python's own handlers come back late.
NATIVE = """
import ctypes, threading, time
from megarl.core.interrupts import Interrupts
system, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
system.pthread_mutex_lock(lock)
with Interrupts():
    try:
        print("up", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("down", flush=True)
        threading.Timer(1.5, system.pthread_mutex_unlock, [lock]).start()
        system.pthread_mutex_lock(lock)
        print("in order", flush=True)
        system.pthread_mutex_lock(lock)
"""


def test_the_same_one_is_no_second_where_it_is_heard_late_and_a_second_ends_native_code_too() -> None:
    process = start(NATIVE)
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "down\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "in order\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGINT


def test_a_reader_that_the_same_ctrl_c_has_ended_makes_no_other_error_of_it() -> None:
    process = start(STUBBORN)
    assert process.stdout is not None and process.stderr is not None
    process.stderr.close()  # as of `2>&1 | tee log`
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "down\n"
    process.kill()
    process.wait()
    process.stdout.close()


# Of a command, whose first moments have handlers that end it at once.
COMMAND = """
import signal, time
from megarl.core.end_signals import SIGNALS, end_at_once
from megarl.core.interrupts import Interrupts
end_at_once()
try:
    with Interrupts():
        print("up", flush=True)
        time.sleep({seconds})
except KeyboardInterrupt:
    pass
print([signal.getsignal(number) == signal.SIG_IGN for number in SIGNALS])
"""


@pytest.mark.parametrize("seconds", [0, 60])
def test_a_command_that_one_has_ended_says_so_whatever_comes_meanwhile(seconds: int) -> None:
    process = start(COMMAND.format(seconds=seconds))
    if seconds:
        process.send_signal(signal.SIGHUP)
    assert process.stdout is not None
    assert process.stdout.read() == f"{[bool(seconds)] * 3}\n"  # some of it may have been read with the first line
    assert process.communicate(timeout=10)[0] == ""


# Waits where Python drops every exception, and then where it does not.
DROPPING = """
import os, signal, sys, time
from megarl.core.interrupts import Interrupts, as_error
def wait():
    print("up", flush=True)
    time.sleep(60)
class Closes:
    def __del__(self):
        wait()
with Interrupts():
    try:
        {drops}
        time.sleep(60)
        print("lost")
    except KeyboardInterrupt as error:
        print(as_error(error).exit_code)
    try:
        time.sleep(0.2)
    except KeyboardInterrupt:
        print("twice")
print(signal.getsignal(signal.SIGALRM) is signal.SIG_DFL, sys.unraisablehook is sys.__unraisablehook__)
"""
# A process is started in the way that has Python call the hooks of a fork.
FORKS = ("os.register_at_fork(before=wait)", "__import__('subprocess').run(['true'], preexec_fn=int)")


@pytest.mark.parametrize("drops", ["Closes()", "; ".join(FORKS)], ids=["of an object", "of a fork"])
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_whose_exception_python_has_dropped_is_raised_again(number: signal.Signals, drops: str) -> None:
    process = start(DROPPING.format(drops=drops))
    process.send_signal(number)
    out, error = process.communicate(timeout=10)
    assert out == f"{128 + number}\nTrue True\n"
    assert error == f"\nmegarl: {number.name}: ending everything in order (Ctrl-C again: at once)\n"


def test_other_errors_that_python_drops_are_told_of_as_ever() -> None:
    process = start(DROPPING.format(drops="type('Fails', (), {'__del__': lambda it: {}[0]})(); wait()"))
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=10)
    assert out == "130\nTrue True\n" and error.count("Exception ignored in: <function <lambda>") == 1
    assert "KeyError: 0" in error


# The state of a signal that comes after Python has looked for one and before the main thread waits: noted, and nobody is woken.
UNSEEN = """
import asyncio, os, signal, threading, time
from megarl.core.interrupts import Interrupts, as_error, run_interruptibly
def other():
    time.sleep(0.2)
    signal.pthread_kill(threading.get_ident(), {number})
with Interrupts():
    try:
        threading.Thread(target=other).start()
        print("up", flush=True)
        {waits}
    except KeyboardInterrupt as error:
        print(as_error(error).exit_code)
time.sleep(1.2)
print(len(os.listdir("/proc/self/task")), signal.getsignal(signal.SIGURG) == signal.SIG_DFL, signal.set_wakeup_fd(-1))
"""


@pytest.mark.parametrize("waits", ["time.sleep(60)", "run_interruptibly(asyncio.sleep(60))"])
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_wakes_nobody_is_heard(number: signal.Signals, waits: str) -> None:
    process = start(UNSEEN.format(number=int(number), waits=waits))
    out, _ = process.communicate(timeout=10)
    assert out == f"{128 + number}\n1 True -1\n"


# Says what came of its work, and with which number it ends.
LOOPING = """
import asyncio
from megarl.core.interrupts import Interrupts, as_error, run_interruptibly
async def work():
    try:
        print("up", flush=True)
        await asyncio.sleep({seconds})
    finally:
        await asyncio.sleep(0.2)
        print("closed", flush=True)
        {closing}
with Interrupts():
    try:
        run_interruptibly(work())
        print("whole")
    except KeyboardInterrupt as error:
        print(as_error(error).exit_code, *getattr(error, "__notes__", ()))
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_work_of_an_event_loop_is_closed_before_a_signal_is_heard(number: signal.Signals) -> None:
    process = start(LOOPING.format(seconds=60, closing=""))
    process.send_signal(number)
    out, error = process.communicate(timeout=10)
    assert out == f"closed\n{128 + number}\n"
    assert error == f"\nmegarl: {number.name}: ending everything in order (Ctrl-C again: at once)\n"


def test_work_that_nobody_interrupts_comes_to_its_end_and_signals_are_as_before() -> None:
    process = start(
        LOOPING.format(seconds=0, closing="") + "import signal; print(signal.getsignal(signal.SIGINT).__name__)"
    )
    assert process.communicate(timeout=10) == ("closed\nwhole\ndefault_int_handler\n", "")


def test_a_signal_is_what_is_heard_where_the_end_goes_wrong() -> None:
    process = start(LOOPING.format(seconds=60, closing="raise OSError('no socket')"))
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=10)[0] == "closed\n143 While it ended, OSError: no socket\n"


def test_an_error_that_no_signal_came_before_is_raised() -> None:
    process = start(LOOPING.format(seconds=0, closing="raise OSError('no socket')"))
    out, error = process.communicate(timeout=10)
    assert out == "closed\n" and error.endswith("OSError: no socket\n") and process.returncode == 1


# Whoever has the system's own handler for a moment gets the signal in that moment.
UNGUARDED = """
import os, signal
real = signal.signal
def noted(number, handler):
    before = real(number, handler)
    if handler == signal.SIG_DFL:
        os.kill(os.getpid(), number)
    return before
with Interrupts():
    signal.signal = noted
    try:
        run_interruptibly(work())
    except KeyboardInterrupt as error:
        print(as_error(error).exit_code)
    finally:
        signal.signal = real
"""


@pytest.mark.parametrize("seconds", [0, 60])
def test_there_is_no_moment_in_which_a_signal_ends_the_process_before_it_is_closed(seconds: int) -> None:
    """Neither when the work ends by itself nor when another signal has come a moment ago."""
    process = start(LOOPING.format(seconds=seconds, closing="").partition("with Interrupts")[0] + UNGUARDED)
    if seconds:
        process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (0, "closed\n130\n" if seconds else "closed\n")


BESIDE = """
import asyncio, os, signal, threading
from megarl.core.interrupts import Interrupts

async def main():
    heard, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR2, heard.set)
    with Interrupts():
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        await asyncio.wait_for(heard.wait(), 30)

asyncio.run(main())
print("up", flush=True)
"""


def test_an_event_loop_that_heard_signals_before_hears_them_meanwhile() -> None:
    assert start(BESIDE).wait(60) == 0
