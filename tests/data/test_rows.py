from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megarl.core.errors import UserError
from megarl.data.rows import json_type, read_rows


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_jsonl_rows_know_their_line_and_blank_lines_count(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"prompt": "né"}\n\n{"prompt": "b"}\n')
    rows = list(read_rows(path))
    assert [(row.number, row.fields["prompt"]) for row in rows] == [(1, "né"), (3, "b")]
    assert rows[1].id == "a.jsonl:3"
    assert rows[1].where == f"{path}, line 3"


def test_parquet_rows_are_the_rows_that_were_written(tmp_path: Path) -> None:
    fields = [{"prompt": f"p{index}", "meta": {"level": index}} for index in range(3000)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(fields), path)
    rows = list(read_rows(path))
    assert [row.fields for row in rows] == fields
    assert rows[2999].where == f"{path}, row 3000"
    assert rows[5].get("meta.level", "a test") == 5


def test_a_dotted_key_prefers_the_literal_field(tmp_path: Path) -> None:
    (row,) = read_rows(write(tmp_path / "a.jsonl", '{"a.b": 1, "a": {"b": 2, "c": {"d": 3}}}'))
    assert row.get("a.b", "a test") == 1
    assert row.get("a.c.d", "a test") == 3
    assert not row.has("a.b.c")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', ["line 2", "malformed JSON", "column"]),
        ('{"prompt": "a"}\n["b"]\n', ["line 2", "a JSON list where an object is wanted"]),
        ("", ["has no rows"]),
        ("\n \n", ["has no rows"]),
    ],
)
def test_a_bad_jsonl_file_is_named_with_its_line(tmp_path: Path, text: str, says: list[str]) -> None:
    path = write(tmp_path / "bad.jsonl", text)
    with pytest.raises(UserError) as caught:
        list(read_rows(path))
    assert all(part in str(caught.value) for part in [str(path), *says])


def test_bytes_that_are_not_utf8_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9t\xe9"}\n')
    with pytest.raises(UserError, match=r"line 2: not UTF-8"):
        list(read_rows(path))


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "{}")
    with pytest.raises(UserError, match=r"trian\.jsonl: there is no such data file.*Did you mean .*train\.jsonl\?"):
        list(read_rows(tmp_path / "trian.jsonl"))
    with pytest.raises(UserError, match="does not exist either"):
        list(read_rows(tmp_path / "nowhere" / "train.jsonl"))


def test_a_folder_and_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match="it is a folder"):
        list(read_rows(tmp_path / "folder.jsonl"))
    with pytest.raises(UserError, match=r"unknown kind of data file '\.csv'. Allowed are \.jsonl"):
        list(read_rows(write(tmp_path / "a.csv", "prompt,answer")))


def test_a_broken_parquet_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a readable Parquet file"):
        list(read_rows(write(tmp_path / "a.parquet", "PAR1 not really")))


def test_an_empty_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(UserError, match="has no rows"):
        list(read_rows(path))


def test_a_missing_field_lists_those_there_and_the_nearest(tmp_path: Path) -> None:
    (row,) = read_rows(write(tmp_path / "a.jsonl", '{"promt": "a", "answer": null}'))
    with pytest.raises(
        UserError, match=r"line 1.*no field 'prompt' \(who\).*'answer', 'promt'.*Did you mean 'promt'\?"
    ):
        row.get("prompt", "who")
    with pytest.raises(UserError, match=r"'answer' .* is null"):
        row.get("answer", "who")


def test_types_are_named_as_json_does() -> None:
    values = [None, True, "a", 1, 1.5, [], {}]
    assert [json_type(value) for value in values] == [
        "null", "true/false", "string", "number", "number", "list", "object",
    ]  # fmt: skip
