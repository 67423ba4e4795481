"""Following a job's log to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import MegarlError, UserError
from megarl.core.ports import free_port
from megarl.launch import watch
from megarl.launch.record import Submission


def test_a_log_is_followed_until_its_writer_has_ended_and_nothing_of_it_is_lost(tmp_path: Path) -> None:
    file, shown = tmp_path / "log", []

    def alive() -> bool:
        """Asked before each look: the job writes once more each time, and then ends."""
        turn = len(asked)
        asked.append(turn)
        if turn:
            with file.open("a") as log:
                log.write(f"line {turn}\n")
        return turn < 3

    asked: list[int] = []
    watch.follow_file(file, alive, shown.append, ask_every_s=0.0)
    assert "".join(shown) == "line 1\nline 2\nline 3\n" and len(asked) == 4


def test_a_scheduler_that_is_silent_for_a_while_does_not_end_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_text("one\n")
    Submission("slurm", "7", log=str(tmp_path / "log")).write(tmp_path)
    answers: list[Any] = [MegarlError("SLURM does not answer"), None]

    def state_of(job: str, cluster: str = "") -> Any:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(watch.slurm, "state_of", state_of)
    monkeypatch.setattr(watch.follow_file, "__defaults__", (0.0,))
    shown: list[str] = []
    watch.show_logs(tmp_path, follow=True, write=shown.append)
    assert (shown, answers) == (["one\n"], [])
    answers.append(MegarlError("SLURM does not answer"))
    with pytest.raises(MegarlError):
        watch.patiently(lambda: bool(state_of("7")), silent_s=-1.0)()


def test_a_character_that_was_half_written_when_it_was_read_is_shown_whole(tmp_path: Path) -> None:
    file, shown, parts = tmp_path / "log", [], [b"caf\xc3", b"\xa9 ", b"\xe2"]

    def alive() -> bool:
        with file.open("ab") as log:
            log.write(parts.pop(0))
        return bool(parts)

    watch.follow_file(file, alive, shown.append, ask_every_s=0.0)
    assert "".join(shown) == "caf\u00e9 \ufffd"  # the last one never came


def test_a_job_of_a_ray_cluster_that_does_not_answer_is_not_said_to_have_ended(tmp_path: Path) -> None:
    Submission("ray", "raysubmit_1", address=f"http://127.0.0.1:{free_port()}").write(tmp_path)
    with pytest.raises(UserError, match=r"does not take jobs from here"):
        watch.cancel(tmp_path)


@pytest.mark.parametrize("follow", [False, True])
def test_a_log_that_cannot_be_read_is_named(follow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Submission("slurm", "7", log="/proc/self/mem").write(tmp_path)
    monkeypatch.setattr(watch, "is_alive", lambda submission: True)
    with pytest.raises(UserError, match="/proc/self/mem cannot be read"):
        watch.show_logs(tmp_path, follow=follow, write=lambda text: None)
