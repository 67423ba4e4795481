"""How a process that is the command ends: at once, with what it has said, where Ray's threads are still about."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import cli
from megarl.core.errors import MegarlError

CODE = """
import atexit, gc, sys
from types import ModuleType
from megarl import cli
if {ray}:
    sys.modules["ray"] = ModuleType("ray")
atexit.register(print, "Python took itself apart")
atexit.register(lambda: print("and looked for no garbage") if gc.get_freeze_count() else None)
sys.argv = ["megarl", *{words}]
cli.entry()
"""


@pytest.mark.parametrize(
    ("ray", "words", "code", "whole"),
    [
        (True, ["train", "nowhere.yaml"], 2, False),
        (False, ["train", "nowhere.yaml"], 2, True),
        (True, ["--help"], 0, True),
    ],
)
def test_a_failed_command_ends_at_once_where_ray_was(
    ray: bool, words: list[str], code: int, whole: bool, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(ray=ray, words=words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == code, done.stderr
    assert ("Python took itself apart" in done.stdout) == ("and looked for no garbage" in done.stdout) == whole
    assert ("nowhere.yaml" in done.stderr) == bool(code)


def test_what_an_error_quotes_moves_no_cursor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(**_: object) -> None:
        raise MegarlError("no sample can be used.\nThe first: no answer in \x1b[2J")

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert capsys.readouterr().err == "megarl: no sample can be used.\nThe first: no answer in \\x1b[2J\n"


def test_a_failed_command_ends_with_its_code_where_nobody_reads_any_more(tmp_path: Path) -> None:
    code = CODE.format(ray=True, words=["train", "nowhere.yaml"])
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, cwd=tmp_path)
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(60) == 2


def test_a_working_directory_that_was_removed_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"rmdir {gone}; exec {sys.executable} -m megarl doctor"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=60, cwd=gone)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "The working directory has been removed" in done.stderr


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", r"\xe9"), ("utf-8", "é")])
def test_letters_that_the_output_has_not_are_escaped(encoding: str, shown: str) -> None:
    recipe = str(Path(__file__).parents[1] / "recipes" / "quickstart.yaml")
    command = [sys.executable, "-m", "megarl", "recipe", "show", recipe, "rollout.stop=[é]"]
    done = subprocess.run(
        command, capture_output=True, check=False, timeout=60, env=os.environ | {"PYTHONIOENCODING": encoding}
    )
    assert done.returncode == 0, done.stderr
    assert f"- {shown}\n" in done.stdout.decode(encoding)


def test_a_full_disk_below_the_output_is_told_in_a_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "megarl", "recipe", "list"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 1 and done.stderr.startswith("megarl: A disk is full: "), done.stderr
    assert len(done.stderr.splitlines()) == 1
