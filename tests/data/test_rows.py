import random
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.core.errors import UserError
from megarl.data.rows import json_type, place_of, read_rows


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
        ('{"prompt": "a"}\n{"prompt": "\\ud83d"}\n', ["line 2", "half a character (\\ud83d without", "Leave it out"]),
        ("[" * 100_000, ["line 1", "JSON that cannot be read", "recursion"]),
        (
            '{"answer": "2", "answer": "3"}',
            ["line 1", "cannot be read", "the field 'answer' stands there more than once"],
        ),
        (f'{{"answer": {"9" * 5000}}}', ["line 1", "JSON that cannot be read", "4300 digits"]),
        ('{"prompt": "a"}\n["b"]\n', ["line 2", "a list where a JSON object is wanted"]),
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


@pytest.mark.parametrize("line", [b"\0" * 40, b"\0", b"\0" * 8 + b'{"prompt": "a"}'], ids=["many", "one", "before"])
def test_nul_bytes_are_named_as_what_they_are(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "cut.jsonl").write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    with pytest.raises(UserError, match=r"line 2: NUL bytes, as a file has that was not written to its end"):
        list(read_rows(tmp_path / "cut.jsonl"))


def test_half_a_character_is_told_however_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "half.jsonl"
    path.write_bytes(b'{"prompt": "\xed\xa0\xbd"}\n')
    with pytest.raises(UserError, match=r"line 1: half a character \(\\ud83d"):
        list(read_rows(path))
    path.write_bytes(b'{"prompt": "\\ud83d\\ude00 \xed\x95\x9c"}\n')
    assert [row.fields["prompt"] for row in read_rows(path)] == ["\U0001f600 \ud55c"]


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "{}")
    with pytest.raises(UserError, match=r"trian\.jsonl: there is no such data file.*Did you mean .*train\.jsonl\?"):
        list(read_rows(tmp_path / "trian.jsonl"))
    with pytest.raises(UserError, match="does not exist either"):
        list(read_rows(tmp_path / "nowhere" / "train.jsonl"))


def test_a_folder_and_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match="is a folder, where a data file is wanted"):
        list(read_rows(tmp_path / "folder.jsonl"))
    with pytest.raises(UserError, match=r"unknown kind of data file '\.csv'. Allowed are \.jsonl"):
        list(read_rows(write(tmp_path / "a.csv", "prompt,answer")))


def test_a_broken_parquet_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a readable Parquet file"):
        list(read_rows(write(tmp_path / "a.parquet", "PAR1 not really")))


@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_parquet_file_with_other_bytes_is_refused_or_read(tmp_path: Path, rng: random.Random) -> None:
    path = tmp_path / "a.parquet"
    columns = {"prompt": ["1+1=?"] * 9, "chat": [[{"role": "user", "content": "é"}]] * 9, "n": list(range(9))}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 3)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    path.write_bytes(content[: rng.randrange(len(content))] if rng.random() < 0.2 else content)
    try:
        rows = [row.fields for row in read_rows(path)]
    except UserError as error:
        assert str(path) in str(error)
    else:
        assert len(rows) > 0


def test_changed_values_are_seen_where_parquet_has_checksums(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": ["abcdefgh"]}), path, compression="none", write_page_checksum=True
    )
    content = path.read_bytes().replace(b"abcdefgh", b"abcdefgX", 1)
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a readable Parquet file"):
        list(read_rows(path))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"], ["c"]], names=["q", "p", "q"]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: more than one column is named 'q'"):
        list(read_rows(tmp_path / "a.parquet"))


def test_numbers_of_few_bits_keep_their_own_digits(tmp_path: Path) -> None:
    path, written = tmp_path / "rows.parquet", [0.1, None, 19.99]
    halves = pyarrow.array([None if each is None else np.float16(each) for each in written], pyarrow.float16())
    floats, objects = (
        pyarrow.array(written, pyarrow.float32()),
        [{"low": 3.14, "name": "x"}, None, {"low": None, "name": "y"}],
    )
    kinds = pyarrow.struct([("low", pyarrow.float32()), ("name", pyarrow.string())])
    columns = {
        "half": halves,
        "single": floats,
        "several": pyarrow.array([[0.1, 3.14], None, []], pyarrow.list_(pyarrow.float32())),
        "object": pyarrow.array(objects, kinds),
        "double": pyarrow.array([0.1, None, float(np.float32(0.1))], pyarrow.float64()),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    one, two, three = (row.fields for row in read_rows(path))
    assert one == {"half": 0.1, "single": 0.1, "several": [0.1, 3.14], "object": objects[0], "double": 0.1}
    assert set(two.values()) == {None}
    assert (three["half"], three["single"], three["several"], three["object"]) == (19.98, 19.99, [], objects[2])
    assert three["double"] == float(np.float32(0.1)) != 0.1


def test_whole_numbers_of_few_bits_are_what_they_are(tmp_path: Path) -> None:
    """The fewest digits that tell 123456792 from its neighbours are those of 123456790."""
    wholes = {pyarrow.float32(): 123456792.0, pyarrow.float16(): 65504.0}
    for kind, whole in wholes.items():
        column = pyarrow.array(np.array([whole, np.inf], kind.to_pandas_dtype()), kind)
        pyarrow.parquet.write_table(pyarrow.table({"answer": column}), tmp_path / "rows.parquet")
        assert [row.fields["answer"] for row in read_rows(tmp_path / "rows.parquet")] == [whole, float("inf")]


def test_a_date_that_python_has_not_names_its_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    dates = pyarrow.array([2**60], pyarrow.timestamp("us"))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1+1="], "made": dates}), path)
    with pytest.raises(UserError, match=r"the column 'made' \(timestamp\[us\]\) has a value that cannot be read"):
        list(read_rows(path))


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
        "null", "true or false", "a string", "a number", "a number", "a list", "an object",
    ]  # fmt: skip


def test_a_star_in_the_name_stands_for_all_files_that_match_by_name(tmp_path: Path) -> None:
    for name in ("part-2.jsonl", "part-1.jsonl", "other.jsonl", "part-[x].jsonl"):
        (tmp_path / name).write_text(f'{{"a": "{name}"}}\n')
    rows = list(read_rows(pattern := tmp_path / "part-*.jsonl"))
    assert [place_of(pattern, row.id) for row in rows] == [row.where for row in rows], (
        "the file is told, not the pattern"
    )
    ids = [row.id for row in rows]
    assert ids == ["part-1.jsonl:1", "part-2.jsonl:1", "part-[x].jsonl:1"]
    assert [row.id for row in read_rows(tmp_path / "part-[*.jsonl")] == ["part-[x].jsonl:1"]
    (tmp_path / "part-*.jsonl").write_text('{"a": 1}\n')  # a file of that very name
    assert [row.id for row in read_rows(tmp_path / "part-*.jsonl")] == ["part-*.jsonl:1"]
    with pytest.raises(UserError, match="no file matches this pattern"):
        list(read_rows(tmp_path / "rows-*.jsonl"))
