from __future__ import annotations

from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.recipe.reward import Reward
from megarl.rewards.check import check_graders, read_key

JUDGE = {"kind": "judge", "url": "https://judge.example/v1", "model": "m"}
REMOTE = {"kind": "remote", "url": "http://rewards:8000/grade"}


def check(**graders: dict[str, Any]) -> None:
    check_graders(Reward.model_validate({"graders": graders}))


def test_good_graders_pass_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")
    check(right={"kind": "rule", "fn": "math"}, far=REMOTE, judge={**JUDGE, "key_env": "JUDGE_KEY"})
    check_graders(Reward())


@pytest.mark.parametrize(
    ("grader", "says"),
    [
        ({"kind": "rule", "fn": "maths"}, r"reward\.graders\.x\.fn='maths'.*Did you mean 'math'"),
        (
            {"kind": "rule", "fn": "copy:copy"},
            r"reward\.graders\.x\.fn='copy:copy'.*prompt, response, answer, metadata",
        ),
        ({**REMOTE, "key_env": "NOT_SET"}, r"`reward\.graders\.x\.key_env` names .* NOT_SET, which is not set on"),
        ({**JUDGE, "key_env": "NOT_SET"}, r"Set it \(export NOT_SET=\.\.\.\) where megarl is started"),
        ({**JUDGE, "template": "{{ reply }}"}, r"`reward\.graders\.x\.template`: there is no variable 'reply'"),
    ],
)
def test_what_cannot_work_is_refused_with_its_key(
    monkeypatch: pytest.MonkeyPatch, grader: dict[str, Any], says: str
) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(UserError, match=says):
        check(x=grader)


def test_a_key_is_one_word_and_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K", "  abc\n")
    assert read_key("K", "x") == "abc"
    assert read_key(None, "x") is None
    for wrong in ("top secret", "top\nsecret", "gehéim"):
        monkeypatch.setenv("K", wrong)
        with pytest.raises(UserError, match=r"`x\.key_env`: what K holds is no key") as caught:
            read_key("K", "x")
        assert wrong not in str(caught.value) and "secret" not in str(caught.value)
    monkeypatch.setenv("K", " ")
    with pytest.raises(UserError, match="not set"):
        read_key("K", "x")
