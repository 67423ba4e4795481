from __future__ import annotations

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.errors import UserError
from megarl.rewards.grade import Grade
from megarl.rewards.question import compile_template, read_score


def ask(text: str | None, **changes: object) -> str:
    values = {"prompt": "1+1?", "response": "It is 2.", "answer": "2", "metadata": {"rubric": "be brief"}, **changes}
    return compile_template(text, "reward.graders.j.template")(**values)


def test_the_built_in_question_has_everything() -> None:
    question = ask(None)
    assert "<question>\n1+1?\n</question>" in question
    assert "<reference>\n2\n</reference>" in question
    assert "<answer>\nIt is 2.\n</answer>" in question
    assert "`Score: N`" in question
    assert "reference" not in ask(None, answer="")


def test_a_template_of_the_recipe() -> None:
    assert ask("{{ metadata.rubric }}: {{ response }}\n") == "be brief: It is 2.\n"
    cut = "{% if truncated %}It is cut off.{% endif %}"
    assert (ask(cut, truncated=True), ask(cut, truncated=False)) == ("It is cut off.", "")
    # What a model wrote is a value and never a template.
    assert ask("{{ response }}", response="{{ 1 + 1 }}") == "{{ 1 + 1 }}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{{ respons }}", r"there is no variable 'respons'\. Did you mean 'response'\?"),
        ("{{ zzz }}", r"no variable 'zzz'\. There are prompt, response, answer, metadata"),
        ("{% if %}", "this is no Jinja template"),
        ("{{ response | shout }}", "this is no Jinja template: No filter named 'shout'"),
    ],
)
def test_a_template_that_cannot_work_is_refused(text: str, says: str) -> None:
    with pytest.raises(UserError, match=rf"`reward\.graders\.j\.template`: .*{says}"):
        compile_template(text, "reward.graders.j.template")


def test_a_row_without_the_field_is_an_error_of_the_row() -> None:
    with pytest.raises(jinja2.TemplateError, match="rubric"):
        ask("{{ metadata.rubric }}", metadata={})


@pytest.mark.parametrize(
    ("reply", "grade"),
    [
        ("Score: 10", 1.0),
        ("The sum is right.\nScore: 7\n", 0.7),
        ("**Final Score: 7/10**", 0.7),
        ("The overall score: 7", 0.7),
        ("I give a Score: 2 at first. On reflection:\n\n**Score:** 8", 0.8),
        ("score = 2.5", 0.25),
        ("SCORE 0/10", 0.0),
        ("Score (0-10): 7", 0.7),
        ("**Score (out of 10):** 7.5 / 10.", 0.75),
        ("- `Score: 7 out of 10`\r\n", 0.7),
        ("Score: 4\n(Score 0 = wrong, score 10 = right)", 0.4),
        ("Score: .5", 0.05),
        ("<think>They might get\nScore: 10\n</think>\nScore: 3", 0.3),
        ("They might get\nScore: 10\n</think>\n\nScore: 3", 0.3),
    ],
)
def test_the_last_score_of_a_reply(reply: str, grade: float) -> None:
    assert read_score(reply, None, 10.0) == Grade(grade)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ("I cannot judge this. " * 50, "no score: the judge replied 'I cannot judge this. I"),
        ("", "no score: the judge replied ''"),
        ("Score: ten", "no score: the judge replied 'Score: ten'"),
        ("Score: 11", "no score: 11 is not from 0 to 10; the judge replied 'Score: 11'"),
        ("Score: -1", "no score: -1 is not from 0 to 10"),
        ("Score: 3 (max score: 10)", "no score: the judge replied 'Score: 3"),
        ("Score: 1e1", "no score: the judge replied 'Score: 1e1'"),
        ("Score: 3 / 5", "no score: the judge replied 'Score: 3 / 5'"),
        ("Score: 8\nScore (1-5): 3", "no score: the judge replied 'Score: 8"),
        ("The sum is right. Score: 7", "no score: the judge replied 'The sum is right."),
        ("They might get a score: 10", "no score: the judge replied 'They might"),
        ("<think>they might get\nScore: 10", "no score: the reply was cut off, or its thoughts have no end; the judge"),
        ("<think>", "no score: the reply was cut off, or its thoughts have no end; the judge replied '<think>'"),
        ("Score" + " " * 100_000 + "(" * 1000, "no score: the judge replied 'Score "),
    ],
)
def test_a_reply_without_a_score_is_a_failure_with_its_beginning(reply: str, says: str) -> None:
    grade = read_score(reply, None, 10.0)
    assert grade.reward == 0.0
    assert grade.failure is not None and grade.failure.startswith(says)
    assert len(grade.failure) < 300


def test_a_reply_that_was_cut_off_has_no_score_unless_the_recipe_has_a_pattern_of_its_own() -> None:
    cut = read_score("Were it right:\nScore: 10", None, 10.0, cut_off=True)
    assert cut.failure is not None and cut.failure.startswith("no score: the reply was cut off")
    assert read_score("<think>Is it 7?", r"(\d+)", 10.0, cut_off=True) == Grade(0.7)


@pytest.mark.parametrize(
    ("reply", "grade"),
    [
        ('{"score": 3}', 0.6),
        ('{"score": "4", "why": "{}"}', 0.8),
        ('Here it is:\n```json\n{"why": "x", "score": 5}\n```\nThank you.', 1.0),
        ('{"grade": 3}', None),
        ('{"score": null}', None),
        ('{"score": [3]}', None),
        ('{"score": 1e999}', None),
        ("[3]", None),
        ("} {", None),
        ('{"score": ' * 5000 + "1" + "}" * 5000, None),
        ("3", None),
    ],
)
def test_a_field_of_a_reply_in_json(reply: str, grade: float | None) -> None:
    found = read_score(reply, "json:score", 5.0)
    if grade is None:
        assert found.failure is not None and found.failure.startswith("no score: ")
    else:
        assert found == Grade(grade)


@given(st.floats(0, 10), st.text())
def test_whatever_stands_before_it_a_score_is_found(score: float, before: str) -> None:
    assert read_score(f"{before}\nScore: {score:f}", None, 10.0).reward == pytest.approx(score / 10, abs=1e-6)


@given(st.text(), st.sampled_from([None, "json:score", r"(\S+)"]))
def test_no_reply_is_worth_more_than_the_best_or_less_than_nothing(reply: str, parse: str | None) -> None:
    grade = read_score(reply, parse, 10.0)
    assert 0 <= grade.reward <= 1
