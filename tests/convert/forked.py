"""Conversions in this process whose ranks are copies of one that has loaded Megatron: for what comes of them.

Not for how processes start and end. As the module of such a rank: <rank> <file of the job> <file for its messages>
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console

from megarl import command_line
from megarl.convert import convert, processes, worker
from megarl.convert.convert import Outcome, Settings, make_layout
from megarl.convert.job import Job, Message, parse_message
from tests.support.forked_ranks import Ranks
from tests.support.platforms import chosen


class Conversions:
    """Makes them, in a folder for what the ranks are told and say. module: what a rank does."""

    def __init__(self, ranks: Ranks, folder: Path, module: str = "tests.convert.forked") -> None:
        self._ranks, self._folder, self._module = ranks, folder, module

    def run_ranks(
        self, job: Job, listen: Callable[[Message], None], poll: Callable[[], None], *, timeout_s: float
    ) -> None:
        """In the place of that of `megarl.convert.processes`, without its refusals."""
        if chosen().has_device_memory:  # those copies have a device each, which a conversion does not need
            return processes.run_ranks(job, listen, poll, timeout_s=timeout_s)
        told, said = self._folder / "job.json", self._folder / "messages"
        told.write_text(job.dump())
        said.write_text("")
        words = self._module, job.layout.world_size, told, said
        assert self._ranks.run(*words, log=self._folder / "log") == ""
        for line in said.read_text().splitlines():
            listen(parse_message(line))
        return None

    def hf_to_mcore(
        self, source: Path, target: Path, *, dtype: Any = None, verify: bool = False, **axes: Any
    ) -> Outcome:
        """As `megarl convert hf-to-mcore`."""
        return convert.hf_to_mcore(source, target, make_layout(**axes), dtype, Settings(verify), _console())

    def mcore_to_hf(
        self, source: Path, target: Path, *, dtype: Any = None, verify: bool = False, **axes: Any
    ) -> Outcome:
        """As `megarl convert mcore-to-hf`."""
        return convert.mcore_to_hf(source, target, make_layout(**axes), dtype, Settings(verify), _console())

    def reshard(self, source: Path, target: Path, **axes: Any) -> Outcome:
        """As `megarl convert reshard --verify`."""
        return convert.reshard(source, target, make_layout(**axes), Settings(verify=True), _console())

    def command(self, *words: object) -> tuple[int, str, str]:
        """`megarl convert` with these words: the exit code, and what it printed to its two outputs."""
        code, out, error = 0, io.StringIO(), io.StringIO()
        with (
            patch.object(convert, "run_ranks", self.run_ranks),
            patch.object(sys, "argv", ["megarl", "convert", *map(str, words)]),
            redirect_stdout(out),
            redirect_stderr(error),
        ):
            try:
                command_line.main()
            except SystemExit as end:
                code = int(end.code or 0)
        return code, out.getvalue(), " ".join(error.getvalue().split())


def _console() -> Console:
    return Console(file=io.StringIO())


def main() -> None:
    """A rank."""
    rank, told, said = sys.argv[1:]
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), 1)
    with Path(told).open() as job:
        sys.stdin, sys.argv = job, [sys.argv[0], rank]
        worker.main()
