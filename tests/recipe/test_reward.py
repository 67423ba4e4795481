"""Graders in a recipe: what is allowed, and how mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.recipe.load import load_recipe
from megarl.recipe.reward import Judge, Remote, Rule
from megarl.recipe.source import dump_yaml

GRADERS = """\
reward:
  graders:
    right: {kind: rule, fn: math}
    style:
      kind: judge
      weight: 0.2
      url: http://judge:8000/v1/
      model: m
      key_env: JUDGE_KEY
    long:
      kind: remote
      url: https://rewards/grade
"""


@pytest.fixture
def graders_file(recipe_file: Path) -> Path:
    recipe_file.write_text(recipe_file.read_text() + GRADERS)
    return recipe_file


def test_graders_have_names_kinds_and_weights(graders_file: Path) -> None:
    loaded = load_recipe(graders_file, ["reward.graders.style.weight=0.5"])
    graders = loaded.recipe.reward.by_name()
    assert list(graders) == ["right", "style", "long"]
    assert isinstance(graders["right"], Rule) and graders["right"].weight == 1.0
    assert isinstance(graders["style"], Judge) and graders["style"].weight == 0.5
    assert graders["style"].url == "http://judge:8000/v1"
    assert isinstance(graders["long"], Remote) and graders["long"].key_env is None
    assert loaded.recipe.reward.key_of("style") == "reward.graders.style"


def test_the_resolved_recipe_reads_back_and_has_no_short_form(
    graders_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-of-the-test")
    loaded = load_recipe(graders_file)
    assert "fn" not in loaded.resolved["reward"]
    again = tmp_path / "again.yaml"
    again.write_text(dump_yaml(loaded.resolved))
    assert "secret-of-the-test" not in again.read_text()
    assert load_recipe(again).recipe == loaded.recipe


@pytest.mark.parametrize(
    ("fn", "name"), [("math", "math"), ("pkg.module:fine", "fine"), ("pkg:Class.method", "method")]
)
def test_the_short_form_is_a_rule_by_the_name_of_its_function(recipe_file: Path, fn: str, name: str) -> None:
    reward = load_recipe(recipe_file, [f"reward.fn={fn}"]).recipe.reward
    assert reward.by_name() == {name: Rule(kind="rule", fn=fn)}
    assert reward.key_of(name) == "reward"


def test_both_forms_are_refused(graders_file: Path) -> None:
    with pytest.raises(UserError, match=r"`reward\.fn` \(on the command line\).*reward\.graders is given.*kind: rule"):
        load_recipe(graders_file, ["reward.fn=exact"])


def test_a_function_that_the_file_names_may_be_taken_back_where_graders_are_given(recipe_file: Path) -> None:
    """On the command line no key can be removed."""
    taken_back = ["reward.graders.right={kind: rule, fn: exact}", "reward.fn=null"]
    loaded = load_recipe(recipe_file, ["reward.fn=math", *taken_back])
    assert list(loaded.recipe.reward.by_name()) == ["right"] and "fn" not in loaded.resolved["reward"]
    assert loaded.recipe == load_recipe(recipe_file, taken_back[:1]).recipe


X = "reward.graders.style"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (f"{X}.urll=1", [f"Unknown key `{X}.urll` (on the command line). Did you mean `{X}.url`?", "has: weight"]),
        (f"{X}.timeout_s=x", [f"`{X}.timeout_s` (on the command line)", 'got "x" (text)', "a number over 0"]),
        (
            f"{X}.kind=jugde",
            [f"`{X}` (on the command line)", "a section with kind: classify or code or judge or remote or rule"],
        ),
        (
            "reward.graders.new={}",
            ["`reward.graders.new`", "a section with kind: classify or code or judge or remote or rule"],
        ),
        ("reward.graders.new=3", ["`reward.graders.new`", "got 3", "a section with kind"]),
        ("reward.graders.new={kind: remote}", ["`reward.graders.new.url` is missing", "where batches are posted to"]),
        ("reward.graders=3", ["`reward.graders`", "a section of names, each with a section with kind"]),
        ("reward.graders.a-b={kind: rule, fn: math}", ["`reward.graders`", "'a-b'", "letters, digits and `_` only"]),
        ("reward.url=http://h", ["Unknown key `reward.url`", "Did you mean `reward.graders.NAME.url`?"]),
        (f"{X}.url=ftp://host", [f"`{X}.url`", "http://host:8000/grade"]),
        (f"{X}.url=http://", [f"`{X}.url`", "http://host:8000/grade"]),
        (f"{X}.url=http://h:port/", [f"`{X}.url`", "http://host:8000/grade"]),
        (f"{X}.url=http://ho st/", [f"`{X}.url`", "http://host:8000/grade"]),
        (f"{X}.only={{source: []}}", [f"`{X}.only.source`", "an empty list is the value of no row"]),
        (f"{X}.parse='('", [f"`{X}.parse`", "no regular expression"]),
        (f"{X}.parse=abc", [f"`{X}.parse`", "'abc' has 0 groups", "json:FIELD"]),
        (f"{X}.parse='json:'", [f"`{X}.parse`", "the name of a field is missing"]),
        ("reward.graders.right.batch=3", ["Unknown key `reward.graders.right.batch`", "reward.graders.NAME.batch"]),
    ],
)
def test_what_is_wrong_is_named(graders_file: Path, override: str, says: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(graders_file, [override])
    for part in says:
        assert part in str(caught.value)


def test_a_mistake_within_a_grader_has_its_line(graders_file: Path) -> None:
    graders_file.write_text(graders_file.read_text().replace("weight: 0.2", "weight: heavy"))
    with pytest.raises(UserError, match=rf"`{X}\.weight` \({graders_file}:16\): got \"heavy\""):
        load_recipe(graders_file)


@pytest.mark.parametrize(
    "override",
    [
        f"{X}.key_env=sk-geheim-123",
        f"{X}.url=https://me:geheim@host/v1",
        f"{X}.url=https://host/v1?key=geheim",
        f"{X}.api_key=geheim",
    ],
)
def test_a_key_in_a_recipe_is_refused_and_not_repeated(graders_file: Path, override: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(graders_file, [override])
    assert "geheim" not in str(caught.value)
    assert "key_env" in str(caught.value)


def test_weights_that_are_all_zero_need_a_reward_model(graders_file: Path) -> None:
    zero = [f"reward.graders.{name}.weight=0" for name in ("right", "style", "long")]
    with pytest.raises(UserError, match=rf"`reward\.graders` \({graders_file}:13\).*every reward would be 0"):
        load_recipe(graders_file, zero)
    assert load_recipe(graders_file, zero[1:])
    assert load_recipe(graders_file, [*zero, "reward_model.path=m"])


def test_the_grader_of_evaluations_is_one_of_the_recipes(graders_file: Path, recipe_file: Path) -> None:
    held_out = "data.eval=held_out.jsonl"
    assert load_recipe(graders_file, [held_out, "eval.grader=style"]).recipe.eval.grader == "style"
    with pytest.raises(
        UserError, match=r"`eval\.grader`.*no grader 'stile'\. The recipe's graders: right, style, long"
    ):
        load_recipe(graders_file, [held_out, "eval.grader=stile"])
