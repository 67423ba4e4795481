"""What is refused as a writer of metrics, in words."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.recipe.writer import asked_by, writer_class

HERE = "tests.recipe.test_writer"


class Kept:
    """One that is accepted."""

    def __init__(self, folder: Any, resumed_step: int | None, more: str = "more") -> None:
        return None

    def write(self, step: int, metrics: dict[str, float]) -> None:
        return None

    def close(self, failed: bool) -> None:
        return None


class Unfilled(Kept):
    """Asks for what nobody knows."""

    def __init__(self, project: str) -> None:
        self.project = project


class Deaf:
    """Has no close."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        return None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Kep", "has no 'Kep'. Did you mean 'Kept'"),
        ("HERE", "it is a str; wanted is a class with `write(self, step, metrics)` and `close(self, failed)`"),
        ("Deaf", "Deaf has no method 'close'"),
        ("Unfilled", "Unfilled asks for project, which nothing fills. It may ask for folder, recipe, resumed_step;"),
    ],
)
def test_what_cannot_be_a_writer_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        writer_class(f"{HERE}:{name}")
    assert message in str(raised.value) and f"report.writer='{HERE}:{name}'" in str(raised.value)


def test_one_says_what_it_asks_for() -> None:
    assert list(asked_by(writer_class(f"{HERE}:Kept"))) == ["folder", "resumed_step", "more"]
