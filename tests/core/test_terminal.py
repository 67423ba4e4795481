"""A terminal that is closed under a command, as a lost connection does: it ends in order, and has no other error of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.core.terminal import forget_no_width
from tests.support.processes import heed_interrupts
from tests.support.terminal import Terminal

# A command that does not end says where it is, before it is given up.
ENDS_S, STACKS_S = 30, 25
# A command that writes to its terminal while it works and while it is taken apart, the bar of a thread too.
WORKING = """
import faulthandler, logging, sys, time
from pathlib import Path
from rich.console import Console
import megarl.run.train
from megarl import cli

def work(*_):
    faulthandler.dump_traceback_later({stacks}, file=open("stacks", "w"))
    with Console().status("working"):
        try:
            print("up", flush=True)
            time.sleep({seconds})
        finally:
            for _ in range(10):
                print("on the way out")
                logging.getLogger("megarl").warning("a warning")
                time.sleep(0.05)
            Path("closed").touch()
    print("the last word")

megarl.run.train.run_train = work
sys.argv = ["megarl", "train", "recipe.yaml"]
cli.entry()
"""


@pytest.mark.parametrize("apart", [False, True], ids=["all-on-it", "errors-in-a-file"])
@pytest.mark.parametrize(("heeds", "seconds", "code"), [(True, 60, 129), (False, 2, 0)], ids=["heeds", "nohup"])
def test_a_terminal_that_is_closed_ends_a_command_in_order_unless_it_was_started_to_outlive_it(
    apart: bool, heeds: bool, seconds: int, code: int, tmp_path: Path
) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    errors = tmp_path / "errors"
    command = [sys.executable, "-c", WORKING.format(seconds=seconds, stacks=STACKS_S)]
    env, heed = {**os.environ, "TERM": "xterm"}, heed_interrupts if heeds else ignore
    with (
        errors.open("wb") as file,
        Terminal(command, stderr=file if apart else None, cwd=tmp_path, env=env, preexec_fn=heed) as terminal,
    ):
        terminal.read_until(lambda shown: "up" in shown, 60.0)
        terminal.close()
        try:
            assert terminal.process.wait(ENDS_S) == code
        except subprocess.TimeoutExpired:
            pytest.fail(f"still there: {errors.read_text()}\n{(tmp_path / 'stacks').read_text()}")
    assert (tmp_path / "closed").exists()
    said = errors.read_text()
    assert "Traceback" not in said and "OSError" not in said and "Exception ignored" not in said
    if apart:
        assert ("megarl: SIGHUP: ending everything in order" in said) == heeds
        assert ("megarl: interrupted by SIGHUP" in said) == heeds


@pytest.mark.parametrize(("width", "left"), [("0", None), ("", None), ("00", None), ("7", "7"), (None, None)])
def test_a_width_of_nothing_is_none(monkeypatch: pytest.MonkeyPatch, width: str | None, left: str | None) -> None:
    """rich takes COLUMNS=0 at its word, and prints tables without a letter."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", width)
    forget_no_width()
    assert os.environ.get("COLUMNS") == left
