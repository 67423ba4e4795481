"""Following a job's log to its end."""

from __future__ import annotations

from pathlib import Path

from megarl.launch import watch


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
