from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from megarl.core.checksums import BLOCK_BYTES, FileSum, file_damage, sum_file, sum_files
from megarl.core.errors import UserError


def test_the_sum_is_that_of_the_whole_file(tmp_path: Path) -> None:
    content = bytes(range(256)) * (BLOCK_BYTES // 256) + b"tail"
    (tmp_path / "a").write_bytes(content)
    assert sum_file(tmp_path / "a") == FileSum(BLOCK_BYTES + 4, f"{zlib.crc32(content):08x}")
    (tmp_path / "empty").touch()
    assert sum_file(tmp_path / "empty") == FileSum(0, "00000000")


def test_content_is_compared_only_where_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    sums = sum_files(tmp_path, ["a"])
    (tmp_path / "a").write_text("two")
    assert file_damage(tmp_path, sums, read=False) == []
    assert file_damage(tmp_path, sums, read=True) == ["a has other content than was written"]


def test_every_missing_or_cut_file_is_named(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("content")
    sums = sum_files(tmp_path, ["a", "b", "c"])
    (tmp_path / "a").unlink()
    (tmp_path / "b").write_text("cut")
    assert file_damage(tmp_path, sums, read=True) == ["a is missing", "b has 3 bytes of 7"]


def test_what_is_no_sum_is_refused() -> None:
    with pytest.raises(UserError, match="is not a file's size and checksum"):
        FileSum.parse({"bytes": 3})
