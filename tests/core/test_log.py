"""Logging: everything to the file, warnings to the console, secrets nowhere."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.core.errors import MegarlError
from megarl.core.log import RunLog, get_logger, setup_logging

SECRET = "s3cret"
LONGER = f"{SECRET}-and-more"


@pytest.fixture
def run_log(tmp_path: Path) -> Iterator[RunLog]:
    log = setup_logging(tmp_path / "logs" / "driver.log", secrets=[SECRET])
    yield log
    log.close()


def written(tmp_path: Path) -> str:
    return (tmp_path / "logs" / "driver.log").read_text()


def test_file_has_all_and_console_has_warnings(
    run_log: RunLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = get_logger("megarl.cluster.pool")
    logger.debug("detail")
    logger.info("two servers up")
    logger.warning("server 1 is slow")
    console = capsys.readouterr().err
    assert "server 1 is slow" in console and "two servers up" not in console
    assert "INFO megarl.cluster.pool: two servers up" in written(tmp_path)
    assert "server 1 is slow" in written(tmp_path) and "detail" not in written(tmp_path)


def test_secrets_are_hidden_also_in_stack_traces(
    run_log: RunLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_log.hide(LONGER)
    try:
        raise RuntimeError(f"refused key {LONGER}")
    except RuntimeError:
        get_logger("megarl").exception("with %s", SECRET)
    for text in (written(tmp_path), capsys.readouterr().err):
        assert "s3cret" not in text and "and-more" not in text
        assert text.count("[hidden]") == 2 and "RuntimeError" in text


def test_what_a_model_wrote_moves_no_cursor(
    run_log: RunLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A grader that raises may quote the response: here one that clears the screen, names the window and turns the text."""
    get_logger("megarl").warning("no answer in %s", "\x1b[2J\x1b]0;mine\x07\x9b1m a\tb\nc \u202e\u2066 שלום 👩\u200d🔬")
    for text in (written(tmp_path), capsys.readouterr().err):
        assert (
            r"no answer in \x1b[2J\x1b]0;mine\x07\x9b1m a" + "\tb\nc " + r"\u202e\u2066" + " שלום 👩\u200d🔬\n" in text
        )


def test_nothing_is_printed_twice_and_close_undoes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    log = setup_logging(tmp_path / "logs" / "driver.log", console_level=None)
    get_logger("megarl.x").warning("during")
    log.close()
    get_logger("megarl.x").warning("after")
    assert written(tmp_path).count("during") == 1 and "after" not in written(tmp_path)
    assert [record.message for record in caplog.records] == ["after"]
    assert "during" not in capsys.readouterr().err


def test_names_stay_under_megarl() -> None:
    assert get_logger("megarl.train").name == "megarl.train"
    assert get_logger("__main__").name == "megarl.__main__"
    assert get_logger("megarlish").name == "megarl.megarlish"
    assert isinstance(get_logger("megarl"), logging.Logger)


def test_a_log_on_a_full_disk_takes_no_place_of_the_error_that_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The driver's log has the same disk as the run. It failed once more as it was closed, and that was all that was said."""
    with pytest.raises(MegarlError, match="what the run says"), setup_logging(Path("/dev/full")):
        get_logger(__name__).info("two servers up")
        raise MegarlError("what the run says")
    assert capsys.readouterr().err == ""
