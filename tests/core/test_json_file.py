from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.core.json_file import read_object, whole_lines


def test_an_object_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, "é"]}', encoding="utf-8")
    assert read_object(path, "Mend it.") == {"a": [1, "é"]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b'{"a": "\xff"}', "is not JSON"),
        (b"9" * 5000, "is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[]", "holds list, not a JSON object"),
        (b"null", "holds NoneType"),
        (b'"x"', "holds str"),
    ],
)
def test_everything_else_is_one_sentence(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says) as error:
        read_object(path, "Mend it.")
    assert str(path) in str(error.value)
    assert str(error.value).endswith(" Mend it.")
    assert "\n" not in str(error.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json is missing\. Mend it\."):
        read_object(tmp_path / "nowhere.json", "Mend it.")
    with pytest.raises(UserError, match="cannot be read"):
        read_object(tmp_path, "Mend it.")


def test_lines_that_were_not_written_to_their_end_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert whole_lines(path) == []
    path.write_bytes(b'{"a": 1}\n{"b": {"a": 3}\n[4]\n{"b": 2}\n{"c": "\xff')
    assert whole_lines(path) == [{"a": 1}, {"b": 2}]


def test_the_last_bytes_of_a_file_of_lines_begin_with_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert whole_lines(path, last_bytes=8) == []
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a": 3}\n{"a"')
    assert whole_lines(path, last_bytes=4) == []
    assert whole_lines(path, last_bytes=20) == [{"a": 3}]
    assert whole_lines(path, last_bytes=22) == [{"a": 3}]
    assert len(whole_lines(path, last_bytes=1000)) == len(whole_lines(path)) == 3
