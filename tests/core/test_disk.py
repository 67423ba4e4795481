"""A result that cannot be written is refused before the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.disk import check_writable
from megarl.core.errors import UserError


def test_a_file_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("kept")
    for path in (new, old):
        check_writable(path, "--html")
    assert not new.exists() and old.read_text() == "kept"


def test_a_place_that_takes_no_file_is_refused_by_its_option(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none" / "x", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError, match=rf"--out {path} cannot be written \({why}\)\. Name a file"):
            check_writable(path, "--out")
