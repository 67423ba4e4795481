import functools
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.rewards.exact import exact
from megarl.rewards.math import math
from megarl.rewards.resolve import asked_for, resolve_reward

HERE = Path(__file__).parent


def test_built_in_names_and_import_paths() -> None:
    assert resolve_reward("math") is math
    assert resolve_reward("exact") is exact
    assert resolve_reward("megarl.rewards.exact:exact") is exact


def test_functions_of_the_folder_and_callable_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_reward("grading:share", HERE)(prompt="", response="ab", answer="abcd", metadata={}) == 0.5
    assert resolve_reward("grading:keyword", HERE)(prompt="", response="", answer="", metadata={}) == 1.0
    monkeypatch.chdir(HERE)
    assert resolve_reward("grading:echo").__name__ == "echo"


def test_a_function_that_wraps_another_is_given_what_it_takes_itself() -> None:
    def inner(prompt: str, response: str, answer: str, metadata: object, truncated: bool = False) -> float:
        return float(truncated)

    @functools.wraps(inner)
    def fixed(prompt: str, response: str, answer: str, metadata: object) -> float:
        return inner(prompt, response, answer, metadata)

    @functools.wraps(inner)
    def handing_on(*values: Any, **named: Any) -> float:
        return inner(*values, **named)

    assert [asked_for(each) for each in (inner, fixed, handing_on)] == [["truncated"], [], ["truncated"]]


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        ("maths", r"reward\.fn='maths': not a reward function\. Allowed are math, exact.*Did you mean 'math'\?"),
        ("pkg.module", "or an import path pkg.module:function"),
        (":fn", "not a reward function"),
        ("no_such_room.grading:share", "there is no module 'no_such_room'"),
        ("megarl.rewards.nothing:share", r"there is no module 'megarl\.rewards\.nothing'"),
        (
            "grading.py:share",
            r"is a file's path, and a module is named as Python imports it: 'grading', from the folder",
        ),
        ("./graders/own:share", r"as Python imports it: 'graders\.own', from"),
        ("/home/me/own.py:share", r"as Python imports it: 'own', from"),
        ("../own.py:share", r"as Python imports it: 'own', from"),
        ("grading:shar", r"grading\.py has no 'shar'\. Did you mean 'share'\?"),
        ("grading:constant", "it is an int; wanted is a function"),
        ("grading:Keyword", "it is a type; wanted is a function"),
        (
            "grading:wrong",
            r"its parameters are \(prompt: 'str', response: 'str'\).*unexpected keyword argument 'answer'",
        ),
        ("grading:each", "it is a generator"),
        ("grading:each_later", "it is a generator"),
    ],
)
def test_what_cannot_be_a_reward_is_refused(fn: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        resolve_reward(fn, HERE)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "import a_package_nobody_has\n",
            "does not import: ModuleNotFoundError: No module named 'a_package_nobody_has'",
        ),
        ("def broken(:\n", "does not import: SyntaxError"),
        ("raise SystemExit('no licence')\n", "does not import: SystemExit: no licence"),
    ],
)
def test_a_module_that_does_not_import_says_why(tmp_path: Path, source: str, says: str) -> None:
    (tmp_path / "broken_reward.py").write_text(source)
    with pytest.raises(UserError, match=says):
        resolve_reward("broken_reward:fn", tmp_path)
