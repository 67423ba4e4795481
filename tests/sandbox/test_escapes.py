"""No escape of the list gets out, as root and as an ordinary user; and each is shown to be a way out where nothing holds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.sandbox.attempts import LIMITS
from tests.sandbox.escapes import ESCAPES, Escape
from tests.support.other_user import REPOSITORY, as_nobody

pytestmark = pytest.mark.slow

ATTEMPTS_S = 120
# Who tries them. A machine where the tests are not root's has the second alone.
USERS = ("root", "ordinary") if os.getuid() == 0 else ("ordinary",)


@pytest.fixture(scope="module", params=USERS)
def attempts(request: pytest.FixtureRequest) -> dict[str, Any]:
    words = ["-m", "tests.sandbox.attempts"]
    other = request.param == "ordinary" and os.getuid() == 0
    return _printed(as_nobody(words) if other else [sys.executable, *words]) | {"user_asked": request.param}


@pytest.fixture(scope="module")
def bare() -> dict[str, Any]:
    return _printed([sys.executable, "-m", "tests.sandbox.attempts", "--bare"])["found"]


def _printed(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True, timeout=ATTEMPTS_S)
    return json.loads(done.stdout)


@pytest.mark.parametrize("escape", ESCAPES, ids=lambda escape: escape.name)
def test_it_stays_inside(escape: Escape, attempts: dict[str, Any]) -> None:
    found = attempts["found"][escape.name]
    assert "ESCAPED" not in found["stdout"] + found["stderr"]
    assert found["ended"] in escape.ends, found
    # Cut marks and what a byte becomes that is no text come on top.
    assert found["kept"] <= 2 * LIMITS.output_bytes + 100
    assert found["seconds"] < escape.timeout_s + 10


def test_nothing_outside_has_changed(attempts: dict[str, Any]) -> None:
    assert attempts["reached"] == []
    assert attempts["victim_lives"]
    assert attempts["marked"] == []
    assert attempts["after"] == "still works\n"
    assert attempts["user"] != 0
    if attempts["user_asked"] == "ordinary":
        assert attempts["user"] == (os.getuid() or 65534)


@pytest.mark.parametrize("escape", [each for each in ESCAPES if not each.not_bare], ids=lambda escape: escape.name)
def test_it_is_a_way_out_where_nothing_holds_it(escape: Escape, bare: dict[str, Any]) -> None:
    assert "ESCAPED" in bare[escape.name]["stdout"], bare[escape.name]
