import pytest

from megarl.data.answers import Answer
from megarl.rewards.exact import exact


def test_white_space_around_does_not_count() -> None:
    assert exact("", " yes\n", "yes", {}) == 1.0
    assert exact("", "y es", "yes", {}) == 0.0
    assert exact("", "Yes", "yes", {}) == 0.0


def test_any_of_several_is_right() -> None:
    assert [exact("", response, ["yes", " yeah"], {}) for response in ("yes", "yeah ", "y", "")] == [1.0, 1.0, 0.0, 0.0]
    assert exact("", "", [], {}) == 0.0
    assert exact("", " ", ["", "5"], {}) == 0.0  # an empty one among several accepts no silence


@pytest.mark.parametrize("answer", [{"a": "yes"}, [["yes"]], ["yes", 1]])
def test_what_is_no_text_is_compared_with_nothing(answer: Answer) -> None:
    with pytest.raises(ValueError, match="no response can be compared"):
        exact("", "yes", answer, {})
