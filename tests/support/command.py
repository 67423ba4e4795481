"""The command line as a shell starts it, in this process: imports are most of what a refusal takes.

Not for how a process begins and ends, nor for what it does beside its words: tests/test_cli.py.
"""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.command_line import main


def megarl(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Call `megarl` with these words, in this folder."""
    out, err = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
            patch.setattr(sys, "argv", ["megarl", *words])
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
