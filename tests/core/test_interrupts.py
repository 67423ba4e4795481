"""Ctrl-C and SIGTERM: said at once, raised once, and a second Ctrl-C ends the process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

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
    # Whoever runs the tests in the background may have them ignore Ctrl-C, which children inherit.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", heed + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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


def test_a_reader_that_the_same_ctrl_c_has_ended_makes_no_other_error_of_it() -> None:
    process = start(STUBBORN)
    assert process.stdout is not None and process.stderr is not None
    process.stderr.close()  # as of `2>&1 | tee log`
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "down\n"
    process.kill()
    process.wait()
    process.stdout.close()
