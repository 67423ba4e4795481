"""A pytest plugin for tests/suite.py: files are what its workers take from the queue, and those that take longest come first.

In the end it says how long each file took, so that the order (file_order.py) can be kept, and how much of the processors.
Its workers are copies (forked_workers.py), which have this module already: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.support import forked_workers
from tests.support.cpu_seconds import Clock
from tests.support.file_order import LONGEST, entry_of, next_of, place_of
from tests.support.platforms import chosen

SHOWN = 25  # files in the table of seconds
CPU_S = "megarl_cpu_s"  # a report's attribute
LONG_S = 40.0  # a file that takes longer is named in file_order.py


class Queue(LoadFileScheduling):
    """xdist's queue of files, with entries of several files."""

    def _split_scope(self, nodeid: str) -> str:
        return entry_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        computes = len(self.nodes) > 2 and node is self.nodes[-1]
        self.workqueue.move_to_end(next_of(list(self.workqueue), computes), last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        """Hand out the next entry no earlier than a worker needs it to begin its last test: xdist does so one test earlier."""
        if not self.workqueue or self._pending_of(self.assigned_work[node]) <= 1:
            super()._reschedule(node)


class Processors:
    """In a worker: what the processors did in each phase of a test goes with its report."""

    def __init__(self) -> None:
        self._clock = Clock()
        self._told = self._clock.seconds() - forked_workers.collecting_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        before, self._told = self._told, self._clock.seconds()
        setattr(report, CPU_S, self._told - before)
        return report

    def pytest_unconfigure(self) -> None:
        self._clock.close()


class Seconds:
    """How long the files took, added up by the process that shows the results."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.of_file: Counter[str] = Counter()
        self.cpu_of_file: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.of_file[file] += report.duration
        self.cpu_of_file[file] += getattr(report, CPU_S, 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total, took = sum(self.of_file.values()), time.monotonic() - self.began
        terminalreporter.section("seconds of the files, and of processors")
        for file, seconds in self.of_file.most_common(SHOWN):
            hint = (
                ""
                if entry_of(file) in LONGEST or seconds < LONG_S
                else "  (tests/support/file_order.py should name it)"
            )
            terminalreporter.write_line(f"{seconds:6.0f} {self.cpu_of_file[file]:6.0f} {file}{hint}")
        cpu_s = sum(self.cpu_of_file.values())
        terminalreporter.write_line(f"{total:6.0f} {cpu_s:6.0f} all {len(self.of_file)}, within {took:.0f} s")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Processors())
        return
    config.pluginmanager.register(Seconds())
    workers = config.getoption("tx")
    if len(workers) > 1 and not chosen().has_device_memory:
        ended = ExitStack()
        config.add_cleanup(ended.close)
        folder = ended.enter_context(tempfile.TemporaryDirectory())
        words = ["--rootdir", str(config.rootpath), *config.args]
        config.option.tx = [f"popen//python={ended.enter_context(forked_workers.copies(folder, words))}"] * len(workers)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place_of(item.nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Queue:
    return Queue(config, log)
