"""What the suite says of its time is read as it is said."""

from __future__ import annotations

from typing import Any, cast

import pytest

from bench.suite import read
from tests.support.file_queue import Seconds


class Lines:
    """What a terminal is given, as lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def section(self, title: str) -> None:
        self.lines.append(f"==== {title} ====")

    def write_line(self, line: str) -> None:
        self.lines.append(line)


def test_what_the_suite_says_is_read() -> None:
    told, terminal = Seconds(), Lines()
    told.began -= 100.0
    told.of_file.update({"tests/core/test_a.py": 3.2, "tests/end_to_end/test_long.py": 61.0})
    told.cpu_of_file.update({"tests/core/test_a.py": 2.0, "tests/end_to_end/test_long.py": 40.4})
    told.pytest_terminal_summary(cast(Any, terminal))
    found = read("\n".join(["noise 12 passed", *terminal.lines, "1 failed, 41 passed in 99.0s", "1 passed in 2s"]))
    assert found["longest"] == [["tests/end_to_end/test_long.py", 61, 40], ["tests/core/test_a.py", 3, 2]]
    assert (found["seconds"], found["cpu_s"], found["of_files_s"], found["num_files"]) == (100, 42, 64, 2)
    assert (found["passed"], found["failed"]) == (41, 1)


def test_a_suite_that_was_ended_says_nothing() -> None:
    with pytest.raises(ValueError, match="ended before"):
        read("   61     40 tests/end_to_end/test_long.py\n")
