"""What the quickstart reads is made anew where it was not made to its end."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from megarl.commands import quickstart
from megarl.core.errors import UserError


def test_what_was_interrupted_is_not_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        out = Path(command[-1])
        out.mkdir(parents=True)
        made.append(out.name)
        if len(made) == 2:
            (out / "half").touch()
            raise KeyboardInterrupt
        (out / "whole").touch()
        return subprocess.CompletedProcess(command, 0, f"{out}: made\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        quickstart.quickstart()
    inputs = tmp_path / ".cache" / "quickstart"
    assert (inputs / "model" / "whole").exists() and not (inputs / "data").exists()
    quickstart.quickstart()
    assert made == [".model", ".data", ".data"]
    assert ".cache/quickstart/data: made" in capsys.readouterr().out.splitlines(), "by the name that it has now"
    assert [path.name for path in sorted(inputs.rglob("*")) if path.is_file()] == ["whole", "whole"]


def test_where_nothing_can_be_written_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a script was called"))
    (tmp_path / "recipes").touch()
    with pytest.raises(UserError, match=f"^{tmp_path}/recipes cannot be written to: File exists. Change into a folder"):
        quickstart.quickstart()
