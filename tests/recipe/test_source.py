from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.errors import UserError
from megarl.recipe.source import Origin, dump_yaml, read_override, read_tree


def read(tmp_path: Path, text: str) -> dict[str, object]:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    return read_tree(file).values


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("1e-5", 1e-5),
        ("1E3", 1000.0),
        ("-2.5e+1", -25.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("7", 7),
        ("-1", -1),
        ("010", "010"),
        ("true", True),
        ("False", False),
        ("on", "on"),
        ("no", "no"),
        ("2026-01-01", "2026-01-01"),
        ("12:30:45", "12:30:45"),
        ("1e5x", "1e5x"),
        ("'1e-5'", "1e-5"),
        ("~", None),
        ("null", None),
        ("", None),
    ],
)
def test_plain_words_are_read_as_yaml_1_2_does(tmp_path: Path, word: str, value: object) -> None:
    found = read(tmp_path, f"key: {word}\n")["key"]
    assert found == value
    assert type(found) is type(value)


def test_every_key_remembers_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# a comment\nrun:\n  seed: 1\n\n  name: x\nflow: {one: 1,\n  two: 2}\n")
    origins = read_tree(file).origins
    lines = {".".join(keys): origin.line for keys, origin in origins.items()}
    assert lines == {"run": 2, "run.seed": 3, "run.name": 5, "flow": 6, "flow.one": 6, "flow.two": 7}
    assert str(origins[("run", "seed")]) == f"{file}:3"


def test_base_is_merged_by_section_and_lists_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "base.yaml").write_text("a: {x: 1, y: 2}\nlist: [1, 2]\nsection: {z: 3}\n")
    file = tmp_path / "deep" / "a.yaml"
    file.write_text("base: ../base.yaml\na: {y: 20}\nlist: [3]\nsection: null\n")
    tree = read_tree(file)
    assert tree.values == {"a": {"x": 1, "y": 20}, "list": [3], "section": None}
    assert {".".join(keys) for keys in tree.given()} == {"a.x", "a.y", "list", "section"}
    assert tree.origins["a", "x"].file == tmp_path / "deep" / "../base.yaml"
    assert tree.origins["a", "y"] == Origin(file, 2)


def test_override_goes_over_the_file_and_opens_sections(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: {x: 1}\nb: null\n")
    tree = read_tree(file)
    for text in ("a.x=2", "b.c.d=[1, two]", "a.y={k: 1e-3}", "a.eq=p=q"):
        tree.merge(read_override(text))
    assert tree.values == {"a": {"x": 2, "y": {"k": 1e-3}, "eq": "p=q"}, "b": {"c": {"d": [1, "two"]}}}
    assert str(tree.origins["a", "x"]) == "on the command line"
    assert tree.origin(("b", "c", "nothing")) == Origin()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a:\n  x: 1\n  y: 2\n  x: 3\n", r"a\.yaml:4: `a\.x` stands twice; the first is at .*a\.yaml:2"),
        ("a: [1, 2\nb: 3\n", r"a\.yaml:2: this is not YAML"),
        ("a: 1\n\tb: 2\n", r"a\.yaml:2: this is not YAML"),
        ("a: !!python/name:os.system\n", r"Cannot read the value of a \(.*a\.yaml:1\)"),
        ("- 1\n", "must hold sections"),
        ("", "must hold sections"),
        ("a: 1\n---\na: 2\n", "not YAML"),
        ("base: 3\n", r"a\.yaml:1: `base` must be the path"),
        ("base: nowhere.yaml\n", r"There is no base of .*a\.yaml \(named at .*a\.yaml:1\) at .*nowhere\.yaml"),
        (f"a: {'[' * 2000}\n", r"a\.yaml: this is not YAML: maximum recursion depth exceeded"),
        (
            "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}}}\n" for n in range(1, 30)),
            r"a\.yaml:\d+: `a\d+\.[pq]\.[pq]\.\.\.` is nested without end",
        ),
        ("a: &x {b: *x}\n", r"a\.yaml:1: `a\.b\.b\.\.\.` is nested without end"),
        ("a: &x [*x]\n", r"Cannot read the value of a "),
        ("? [1]\n: 2\n", r"a\.yaml:1: a key must be a plain word"),
    ],
)
def test_bad_files_are_refused_with_their_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read(tmp_path, text)


def test_a_key_twice_in_a_value_of_the_command_line() -> None:
    with pytest.raises(UserError, match=r"^on the command line: `a\.b` stands twice; the first is at the same place\."):
        read_override("a={b: 1, b: 2}")
    with pytest.raises(UserError, match="is not YAML"):
        read_override(f"a={'[' * 2000}")


def test_a_base_of_a_base_is_refused(tmp_path: Path) -> None:
    (tmp_path / "grand.yaml").write_text("a: 1\n")
    (tmp_path / "base.yaml").write_text("b: 1\nbase: grand.yaml\n")
    with pytest.raises(UserError, match=r"base\.yaml:2: a base may not have a base"):
        read(tmp_path, "base: base.yaml\n")


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no recipe at .*x\.yaml"):
        read_tree(tmp_path / "x.yaml")
    with pytest.raises(UserError, match=r"the recipe, is a folder\. Name a file in it"):
        read_tree(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(UserError, match="UTF-8"):
        read_tree(tmp_path / "b.yaml")


def test_a_recipe_that_is_a_pipe_is_told_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipe.yaml")
    with pytest.raises(UserError, match=r"recipe\.yaml, the recipe, is a pipe or a device.*Write it into a file"):
        read_tree(tmp_path / "recipe.yaml")


def test_a_base_that_is_not_there_is_looked_for_beside_its_recipe(tmp_path: Path) -> None:
    (tmp_path / "common.yaml").write_text("a: 1\n")
    with pytest.raises(UserError) as caught:
        read(tmp_path, "base: comon.yaml\n")
    assert f"at {tmp_path}/comon.yaml. Did you mean {tmp_path}/common.yaml?" in str(caught.value)
    assert f"is relative to {tmp_path}." in str(caught.value)


def test_variables_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": "10", "DATA": "/data", "EMPTY": ""}.items():
        monkeypatch.setenv(name, value)
    text = """\
a: {b: ${DATA}/x, c: [${STEPS}, {d: ${STEPS}}], e: $${STEPS}}   # not ${IN_COMMENTS}
d: ${STEPS}
e: '${STEPS}'
f: ${EMPTY}
g: costs $5, $$ and $${ ${DATA}${STEPS}
"""
    values = read(tmp_path, text)
    assert values == {
        "a": {"b": "/data/x", "c": [10, {"d": 10}], "e": "${STEPS}"},
        "d": 10,
        "e": "10",
        "f": None,
        "g": "costs $5, $$ and ${ /data10",
    }
    assert read(tmp_path, dump_yaml(values)) == values
    assert read_override("a.b={c: ${STEPS}}").values == {"a": {"b": {"c": 10}}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "a:\n  b: x/${NOT_SET_HERE}",
            r"`a\.b` \(.*a\.yaml:2\): the environment variable NOT_SET_HERE is not set\. Set it",
        ),
        ("a:\n- {b: [${NOT_SET_HERE}]}", r"`a` \(.*a\.yaml:2\): the environment variable NOT_SET_HERE is not set"),
        (
            "a: ${NOT-A-NAME}",
            r"`a` \(.*a\.yaml:1\): '\$\{NOT-A-NAME\}' names no environment variable\. Write \$\{NAME\}",
        ),
        ("a: ${HOME", r"`a` \(.*a\.yaml:1\): '\$\{HOME' has no closing brace\. Write \$\{NAME\}"),
        ("a: {b: '${HOME', c: 1}", r"'\$\{HOME' has no closing brace"),
        ("a: '${'", r"a\.yaml:1.*or \$\$\{ for a plain"),
    ],
)
def test_a_variable_that_is_not_there_is_named(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        read(tmp_path, text)


@pytest.mark.parametrize("text", ["train.steps", "=3", "a..b=1", ".a=1", "a.=1", "a=[1"])
def test_malformed_overrides_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="on the command line"):
        read_override(text)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)
    | st.sampled_from(
        ["1e-5", "on", "010", "2026-01-01", "true", "null", "1_000", "0x1f", "~", "=", "<<", "${A}", "$${", "a ${"]
    )
)
names = st.text("abcdefgh_", min_size=1, max_size=6)


@given(st.dictionaries(names, scalars | st.lists(scalars, max_size=3) | st.dictionaries(names, scalars, min_size=1)))
def test_what_is_dumped_reads_back_the_same(values: dict[str, object]) -> None:
    text = dump_yaml(values)
    for key, value in values.items():
        found = read_override(f"top={text}" if not values else f"top={dump_yaml({key: value})}").values["top"]
        assert found == {key: value}
        inner = found[key]
        assert type(inner) is type(value)
    assert yaml.safe_load(text.replace("$${", "${")) == values
