"""Python as an ordinary user, where the tests are root's: the interpreter and the repository may be where nobody else reads."""

from __future__ import annotations

import sys
from pathlib import Path

NOBODY = 65534
REPOSITORY = Path(__file__).parents[2]
PLACE = "/mnt"


def as_nobody(words: list[str]) -> list[str]:
    """The command for `python3 ...` as user nobody, with the standard library and this repository, without packages.

    Both are mounted where nobody else sees them.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    script = (
        f"mount -t tmpfs none {PLACE} && mkdir {PLACE}/python {PLACE}/repository && "
        f'mount --bind "$0" {PLACE}/python && mount --bind "$1" {PLACE}/repository && cd / && shift && '
        f"exec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups --inh-caps=-all env -i PATH=/usr/bin:/bin "
        f'PYTHONPATH={PLACE}/repository LD_LIBRARY_PATH={PLACE}/python/lib {PLACE}/python/bin/{version} "$@"'
    )
    return ["unshare", "--mount", "sh", "-c", script, sys.base_prefix, str(REPOSITORY), *words]
