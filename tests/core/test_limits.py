"""How many files a process may have open."""

from __future__ import annotations

import subprocess
import sys

import pytest

ASKED = """
import resource
from megarl.core.limits import raise_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
raise_open_files({wanted})
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "then"),
    [(256, 1024, 2048, 1024), (1024, 1024, 2048, 1024), (256, 1024, 512, 512), (1024, 1024, 512, 1024)],
)
def test_as_many_as_the_system_lets_it_and_never_fewer_than_before(
    soft: int, hard: int, wanted: int, then: int
) -> None:
    asked = [sys.executable, "-c", ASKED.format(soft=soft, hard=hard, wanted=wanted)]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(then), str(hard)]
