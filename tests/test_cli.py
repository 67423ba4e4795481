"""How a process that is the command ends: at once, with what it has said, where Ray's threads are still about."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import megarl
from megarl import command_line
from megarl.core.end_signals import SIGNALS
from megarl.core.errors import InterruptError, MegarlError
from tests.support.processes import heed_interrupts

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

WAITING = """
import time
from megarl import command_line
def waits():
    print("up", flush=True)
    time.sleep(60)
command_line.app.command()(waits)
cli.entry()
"""


def test_versions_are_said_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["megarl", "--version"])
        with pytest.raises(SystemExit) as end:
            command_line.main()
    said = dict(each.split(" ") for each in capsys.readouterr().out.strip().split(", "))
    assert not end.value.code
    assert [*said] == ["megarl", *command_line.ENGINES]
    assert said["torch"] == version("torch")


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


def test_a_command_that_a_signal_has_ended_ends_at_once(tmp_path: Path) -> None:
    """Python takes handlers off as it takes itself apart: the next signal would end it with a code of its own."""
    code = CODE.format(ray=False, words=["waits"]).replace("cli.entry()", WAITING)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        preexec_fn=heed_interrupts,
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, ""), error


def test_what_an_error_quotes_moves_no_cursor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(**_: object) -> None:
        raise MegarlError("no sample can be used.\nThe first: no answer in \x1b[2J")

    monkeypatch.setattr(command_line, "app", fails)
    with pytest.raises(SystemExit) as end:
        command_line.main()
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


# The command, or what it begins with, waits as it finds a module; the signal of a shell that has just started it comes then.
BEGINNING = """
import sys, time
class Waits:
    def find_spec(name, path=None, target=None):
        if name == "{module}":
            sys.meta_path.remove(Waits)
            print("up", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Waits)
sys.argv = ["megarl", "recipe", "list"]
{begin}
"""
SCRIPT = "from megarl.cli import entry; sys.exit(entry())"
# Typer has the command by then, and would end with 130 and no word at a KeyboardInterrupt.
IN_TYPER = (
    """
import typer.main
real = typer.main.get_command
def waits(app):
    print("up", flush=True)
    time.sleep(60)
    return real(app)
typer.main.get_command = waits
"""
    + SCRIPT
)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("module", "begin"),
    [
        ("megarl.command_line", SCRIPT),
        ("megarl.commands.submit", "import runpy; runpy.run_module('megarl', run_name='__main__')"),
        ("", IN_TYPER),
    ],
    ids=["as the script begins", "while commands load", "in typer"],
)
def test_a_signal_in_the_first_moments_is_one_sentence(number: signal.Signals, module: str, begin: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BEGINNING.format(module=module, begin=begin)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(number)
    out, error = process.communicate(timeout=10)
    assert (process.returncode, out) == (128 + number, "")
    assert error == f"megarl: {InterruptError(number)}\n" and error.count("\n") == 1


def test_a_signal_that_is_ignored_stays_so_in_the_first_moments() -> None:
    """As nohup has it of SIGHUP, and a shell of Ctrl-C for what it starts in the background."""
    code = "import signal\nfrom megarl.core.end_signals import end_at_once, SIGNALS\nend_at_once()\n"
    code += "print([signal.getsignal(each) == signal.SIG_IGN for each in SIGNALS])"
    ignoring = [sys.executable, "-c", f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{code}"]
    done = subprocess.run(ignoring, capture_output=True, text=True, check=True, preexec_fn=heed_interrupts)
    assert done.stdout == "[True, False, False]\n"


def test_what_comes_before_signals_are_heard_is_tiny() -> None:
    """Of megarl next to nothing, and of the rest what Python itself has loaded as it begins, or nearly so."""
    code = "import os, re, sys; there = set(sys.modules); import megarl.cli; print(*sorted(set(sys.modules) - there))"
    root = Path(megarl.__file__).parent.parent
    # -S: without what an installation loads, as an editable one does, before it begins.
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=root)
    ours = {"megarl", "megarl.cli", "megarl.core", "megarl.core.end_signals"}
    assert ours <= set(done.stdout.split()) <= ours | {"__future__", "contextlib", "signal", "_signal"}
