"""Ranks of a conversion that end before they have begun."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.convert import processes
from megarl.convert.job import Job
from megarl.core.errors import WorkerDiedError
from megarl.core.layout import Layout
from megarl.models.hf_dtypes import Dtypes

LONGER_THAN_A_PIPE = Path("/" + "x" * 2**20)


def test_a_rank_that_ends_before_it_has_heard_its_job_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = tmp_path / "dying.py"
    dying.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setattr(processes, "GUARD", dying)
    dtypes = Dtypes("bfloat16", {})
    job = Job("reshard", LONGER_THAN_A_PIPE, Path("/c"), Path("/hf"), Layout(), dtypes, False, 1234, 9.5, True)
    with pytest.raises(WorkerDiedError, match="Rank 0 of the conversion ended: signal SIGKILL; nothing was kept"):
        processes.run_ranks(job, lambda _: None, lambda: None, timeout_s=30)
