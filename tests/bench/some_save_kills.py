"""A few kills in saves, in a process that has loaded the engine already: words are the number of kills and a folder."""

from __future__ import annotations

import sys
from pathlib import Path

from bench import save_kills


def main() -> None:
    save_kills.main(int(sys.argv[2]), seed=1, out=Path(sys.argv[3]))
