from megarl.rewards.exact import exact


def test_white_space_around_does_not_count() -> None:
    assert exact("", " yes\n", "yes", {}) == 1.0
    assert exact("", "y es", "yes", {}) == 0.0
    assert exact("", "Yes", "yes", {}) == 0.0
