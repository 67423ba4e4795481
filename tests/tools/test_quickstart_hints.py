"""What the quickstart says at its end names commands, recipes and pages that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from typer.main import get_command

from megarl.command_line import app

ROOT = Path(__file__).parents[2]


def test_the_quickstart_says_where_to_go_next() -> None:
    said = subprocess.run(["make", "-n", "quickstart"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    hints = said[said.index("Where to go next") :]
    commands = [words.split() for words in re.findall(r"bin/megarl ([^']+)", hints)]
    assert [words[0] for words in commands] == ["eval", "plan", "recipe"]
    known = get_command(app).commands  # type: ignore[attr-defined]
    for words in commands:
        assert words[0] in known and all((ROOT / word).is_file() for word in words if word.endswith(".yaml"))
    assert all((ROOT / page).is_file() for page in re.findall(r"docs/\w+\.md", hints))
