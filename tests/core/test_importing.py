"""What is said of a function that is not where the recipe says."""

import os
from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.core.importing import import_attribute, raised_at


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(path: str) -> str:
    with pytest.raises(UserError) as refused:
        import_attribute(path, "reward.fn")
    return str(refused.value)


def test_a_folder_in_the_place_of_a_module_is_called_one(folder: Path) -> None:
    inner = folder / "some_rewards"
    inner.mkdir()
    (inner / "mine.py").write_text("def score(): ...\n")
    assert said("some_rewards:score") == (
        f"reward.fn='some_rewards:score': 'some_rewards' is a folder, {inner}. "
        "Name a file in it, such as 'some_rewards.mine:score'."
    )
    (folder / "some_data").mkdir()
    assert "is a folder without a Python file, " in said("some_data:score")


def test_a_module_without_a_file_is_named(folder: Path) -> None:
    assert said("sys:score") == "reward.fn='sys:score': the module 'sys', which is Python's own, has no 'score'."


def test_an_error_while_a_module_loads_is_told_with_the_users_line(folder: Path) -> None:
    (folder / "loads_badly.py").write_text("import json\n\nLEVELS = json.loads('{')\n")
    assert " (loads_badly.py, line 3). Mend the module" in said("loads_badly:score")
    (folder / "asks_for_more.py").write_text("import os\n\nKEY = os.environ['MEGARL_TEST_NO_SUCH_KEY']\n")
    assert "MEGARL_TEST_NO_SUCH_KEY" not in os.environ
    assert "KeyError: 'MEGARL_TEST_NO_SUCH_KEY' (" in said("asks_for_more:score")
    assert "line 3" in said("asks_for_more:score")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.chdir(Path(__file__).parent)
        assert f" ({folder / 'loads_badly.py'}, line 3). Mend" in said("loads_badly:score")
    (folder / "half_written.py").write_text("def score(\n")
    assert said("half_written:score").count("line 1") == 1


def test_where_an_error_came_from_is_told_without_a_working_directory(tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(gone)
        gone.rmdir()
        try:
            raise ValueError
        except ValueError as error:
            assert raised_at(error).startswith(f" ({Path(__file__)}, line ")
