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


TIGHT = """
import resource
from megarl.core.limits import tight
{limits}
print(tight())
"""


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"AS": 2 << 30}, "2,048.0 MiB of address space (ulimit -v)"),
        ({"FSIZE": 100 << 10, "NOFILE": 64}, "0.1 MiB in a file (ulimit -f), 64 open files (ulimit -Hn)"),
        ({"NPROC": 60}, "60 threads of this user (ulimit -u)"),
        ({"NOFILE": 1024}, ""),
    ],
)
def test_limits_that_may_be_why_nothing_starts_are_told(limits: dict[str, int], said: str) -> None:
    """Ray says that its node timed out, as on a busy machine."""
    lines = [f"resource.setrlimit(resource.RLIMIT_{name}, ({most}, {most}))" for name, most in limits.items()]
    asked = [sys.executable, "-c", TIGHT.format(limits="\n".join(lines))]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        f"This process has limits that may be the reason: {said}. Raise them." if said else ""
    )
