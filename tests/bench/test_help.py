"""Every benchmark says what it does when it is asked, and does not take hours instead."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import bench

ROOT = Path(bench.__path__[0])
# One hands all that it is given to pytest.
COMMANDS = [path for path in sorted(ROOT.glob("*.py")) if "__main__" in path.read_text() and path.stem != "suite"]


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_a_benchmark_reads_its_options(path: Path) -> None:
    assert re.search(r"no_options\(|ArgumentParser\(|typer\.run\(|parse_args\(", path.read_text())


def test_one_without_options_answers_and_refuses() -> None:
    def said(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bench.measured", *words]
        return subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=False)

    asked, wrong = said("--help"), said("--quick")
    assert asked.returncode == 0 and "usage:" in asked.stdout and "| `python -m" not in asked.stdout
    assert wrong.returncode == 2 and "--quick" in wrong.stderr and not wrong.stdout
