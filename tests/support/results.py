"""A pytest plugin: what became of every test, JSON lines that are written as it begins and ends. For tools/gpu_check.

outcome: begun, and then passed, failed, lacking (what the machine has not, in `why`), or late (the time that was given is over).
of: the check. A test whose last line says that it has begun ended its process.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.core.json_file import whole_lines

OF = "MEGARL_GPU_CHECK"  # tools/gpu_check's
BROKEN = ("CUDA error", "device-side assert", "CUBLAS_STATUS", "NCCL error")
SHOWN = 4000  # characters of what a test that failed has printed


class Results:
    """Writes the lines, leaves out tests that a line is there of already, and begins none once the time is over.

    Behind an error of CUDA's the process ends: everything that it would do on the device would fail as well.
    """

    def __init__(self, file: Path, until: float | None) -> None:
        """until: seconds of the epoch, after which no test begins."""
        self._file, self._until = file, until
        self._done = {line["test"] for line in whole_lines(file)}
        self._seconds: dict[str, float] = {}
        self._found: dict[str, tuple[str, str]] = {}
        self._session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        again = [item for item in items if item.nodeid in self._done]
        if again:
            config.hook.pytest_deselected(items=again)
            items[:] = [item for item in items if item.nodeid not in self._done]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._until is not None and time.time() > self._until:
            self._found[item.nodeid] = "late", "no time was left"
            pytest.skip("no time was left")
        self._write(item.nodeid, "begun", "the process ended within it", 0.0)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file whose imports fail, or that asks for what is not there, is one line."""
        if report.outcome != "passed" and report.nodeid not in self._done:
            self._write(report.nodeid, "failed" if report.failed else "lacking", said(report), 0.0)
            self._show(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.failed:
            self._found[name] = "failed", said(report)
            self._show(report)
        elif report.skipped:
            self._found.setdefault(name, ("lacking", said(report)))
        if report.when == "teardown":
            outcome, why = self._found.pop(name, ("passed", ""))
            self._write(name, outcome, why, self._seconds.pop(name))
            if outcome == "failed" and any(words in why for words in BROKEN) and self._session is not None:
                self._session.shouldstop = f"the device is of no more use to this process: {name}"

    def _show(self, report: Any) -> None:
        """The error at once: pytest keeps it to the end, which a process that is killed does not reach."""
        terminal = self._session and self._session.config.pluginmanager.get_plugin("terminalreporter")
        if terminal and report.failed:
            said_besides = [f"--- {title}\n{text[-SHOWN:]}" for title, text in report.sections]
            terminal.write_line("\n".join([f"--- {report.nodeid}", report.longreprtext, *said_besides]))
            terminal.flush()

    def _write(self, test: str, outcome: str, why: str, seconds: float) -> None:
        line = {"test": test, "outcome": outcome, "seconds": round(seconds, 3), "why": why}
        line["of"] = os.environ.get(OF, "")
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def said(report: Any) -> str:
    """Why, in a line: the last of the error, or the reason of a skip."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    # A file that does not import has no crash of its own: its traceback ends with the reason.
    text = crash.message if crash is not None else (str(report.longrepr).strip().splitlines() or [""])[-1]
    return " ".join(text.split())[:600]
