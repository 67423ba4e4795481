"""Units are taken away where both may have them, and have to be the same where both do."""

from __future__ import annotations

import pytest

from megarl.rewards.answer_units import changes, without_units


@pytest.mark.parametrize(
    ("found", "wanted", "values"),
    [
        (r"5\text{ cm}", "6", ("5", "6")),
        ("5 cm", r"6\,\mathrm{cm}", ("5", "6")),
        ("12 cm^2", r"12\text{ square centimeters}", ("12", "12")),
        (r"9.8\,\mathrm{m}/\mathrm{s}^{2}", "9.8 meters per second^2", ("9.8", "9.8")),
        (r"45^\circ", "45 degrees", ("45", "45")),
        (r"20^{\circ} \mathrm{C}", r"20\text{ degrees Celsius}", ("20", "20")),
        (r"\$18.90", "19 dollars", ("18.90", "19")),
        (r"3\sqrt{2}\text{ apples}", "3", (r"3\sqrt{2}", "3")),
        ("5m", "5", ("5", "5")),
        ("5", "5m", ("5", "5m")),
        ("5", "5 m", ("5", "5")),
        ("5m", "5s", ("5m", "5s")),
        (r"5\text{ m}", "5m", ("5", "5")),
        ("x+2h", "x+2", ("x+2h", "x+2")),
        (r"\sin 30^\circ", "1", (r"\sin 30^\circ", "1")),
        (r"17\text{ or 18}", "17", (r"17\text{ or 18}", "17")),
        (r"5\text{ thousand}", "5", (r"5\text{ thousand}", "5")),
        (r"x\text{-axis}", "x", (r"x\text{-axis}", "x")),
        (r"5\text{ cm}", r"5\text{ m}", None),
        (r"5\text{ cm}", "5m", None),
        (r"12\text{ cm}^2", r"12\text{ cm}", None),
        ("60 mph", "60 km/h", None),
        ("5 cents", r"\$5", None),
        ("20°", "20 radians", ("20°", "20")),  # signs are spelled out before
    ],
)
def test_values_and_units(found: str, wanted: str, values: tuple[str, str] | None) -> None:
    assert without_units(found, wanted) == values


def test_words_that_make_another_number() -> None:
    assert all(changes(words) for words in ("million", "or so", "is wrong", "perhaps thirteen", "squared"))
    assert not any(changes(words) for words in ("apples", "square meters", "students in all", "north"))
