"""Exit codes: one table, which the docs hold and real commands keep."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl import command_line
from megarl.core import errors
from megarl.core.end_signals import SIGNALS
from megarl.core.errors import InterruptError, MegarlError
from megarl.core.exit_codes import EXIT_CODES, render

ROOT = Path(__file__).parents[2]
CODES = {row.code for row in EXIT_CODES}

# What a command does, and what it ends with.
ENDINGS: dict[str, tuple[str, int]] = {
    "done": ("pass", 0),
    "a fault": ("raise WorkerDiedError('rank 0 died')", 1),
    "a deadline": ("raise DeadlineError('too late')", 1),
    "a full disk": ("raise DiskFullError('full')", 1),
    "refused": ("raise UserError('no such file')", 2),
    "stopped on request": ("raise StoppedError('after step 3')", 75),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", 130),
    "SIGHUP": ("os.kill(os.getpid(), signal.SIGHUP); time.sleep(9)", 129),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", 143),
}


def test_the_page_is_made_of_the_table() -> None:
    page = (ROOT / "docs" / "exit_codes.md").read_text()
    assert page == render(), "python -m megarl.core.exit_codes > docs/exit_codes.md"
    assert len(CODES) == len(EXIT_CODES)


def test_every_error_ends_with_a_code_of_the_table() -> None:
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, MegarlError)]
    assert {each.exit_code for each in kinds} == {1, 2, 75}
    assert {InterruptError(number).exit_code for number in SIGNALS} | {1, 2, 75} <= CODES


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_command_ends_with_its_code(
    ending: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, wanted = ENDINGS[ending]

    def run(*arguments: Any) -> None:
        exec(f"import os, signal, time\nfrom megarl.core.errors import *\n{code}")

    monkeypatch.setattr("megarl.run.train.run_train", run)
    monkeypatch.setattr(sys, "argv", ["megarl", "train", "recipe.yaml"])
    # Shells start what they put into the background with SIGINT ignored, and nohup with SIGHUP; that is inherited.
    inherited = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    try:
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        assert [signal.getsignal(number) for number in SIGNALS] == [signal.default_int_handler] * len(SIGNALS)
    finally:
        for number, handler in inherited.items():
            signal.signal(number, handler)
    assert (ended.value.code or 0) == wanted and wanted in CODES
    error = capfd.readouterr().err
    assert error == "" if wanted == 0 else "megarl: " in error and "Traceback" not in error


def test_a_wrong_command_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["megarl", "train", "--no-such-option"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 2
