"""docs/errors.md and the list of all messages say what the code raises."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import pytest

from megarl.core.errors import MegarlError
from tests.docs.pages import DOCS, ROOT
from tools.list_messages import CLASSES, Message, messages, render

PAGE = (DOCS / "errors.md").read_text()
# Put together of parts, so that no place in the code has it whole; the page's own examples show the first.
COMPOSED = ("Unknown key ...", "There is no ... at ...", "this machine makes no sandbox: ...")


@functools.cache
def all_messages() -> tuple[Message, ...]:
    """Read when a test asks: every worker of the suite loads this file, and one of them runs it."""
    return tuple(messages(ROOT / "megarl"))


def rows() -> Iterator[list[str]]:
    """Cells of all tables, heads aside."""
    for line in PAGE.splitlines():
        if line.startswith("|") and not line.startswith(("|---", "| message", "| code")):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def shown() -> list[tuple[str, str | None]]:
    """Messages as the page has them, and the error's class where it says so."""
    found = []
    for cells in rows():
        if cells[0].startswith("`"):
            error = cells[1].strip("`") if cells[1].strip("`") in CLASSES else None
            found += [(text, error) for text in re.findall(r"`([^`]+)`", cells[0])]
    return found


def matches(text: str, message: str) -> bool:
    """Whether the parts of the page's text, `...` between them, are in the message in this order."""
    at = 0
    for part in text.split("..."):
        position = message.find(part.strip(), at)
        if position < 0:
            return False
        at = position + len(part.strip())
    return True


@pytest.mark.parametrize(("text", "error"), shown())
def test_a_message_of_the_page_is_one_of_the_code(text: str, error: str | None) -> None:
    if text in COMPOSED:
        return
    found = {each.error for each in all_messages() if matches(text, each.text)}
    assert found, text
    assert error is None or error in found


def test_the_exit_codes_are_those_of_the_classes() -> None:
    table = {cells[0]: re.findall(r"`(\w+)`", cells[2]) for cells in rows() if cells[0].isdigit()}
    said = {name: int(code) for code, names in table.items() for name in names}
    assert said == {name: error.exit_code for name, error in CLASSES.items() if name in said}
    assert set(said) >= {"MegarlError", "UserError", "DeadlineError", "WorkerDiedError", "SyncError", "StoppedError"}


def test_every_class_is_in_the_list_of_all_messages() -> None:
    page = render(ROOT / "megarl")
    assert len(all_messages()) > 200
    assert {each.error for each in all_messages()} == {name for name in CLASSES if f"| {name} |" in page}
    assert all(issubclass(error, MegarlError) for error in CLASSES.values())
    assert "&lt;...&gt;: there is no such data file (&lt;...&gt;)." in page
