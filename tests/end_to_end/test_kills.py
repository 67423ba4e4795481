"""Four of the kills of docs/kills.md, others each day: `kill -9` of any process in any phase changes nothing, to the bit."""

from __future__ import annotations

import random
from datetime import date
from pathlib import Path

import pytest

from bench.kills import Cell, is_same, run_cells, run_in_peace
from bench.support.killed_runs import KINDS, PHASES

pytestmark = pytest.mark.slow

NUM_KILLS = 4  # of a day
ALL = [Cell(kind, phase) for kind in KINDS for phase in PHASES]


@pytest.mark.timeout(1500)
def test_a_run_that_loses_its_processes_learns_what_it_would_have(tmp_path_factory: pytest.TempPathFactory) -> None:
    chosen = random.Random(date.today().toordinal()).sample(ALL, NUM_KILLS)
    folder: Path = tmp_path_factory.mktemp("kills")
    run_in_peace(folder)
    made, missed = run_cells(folder, "struck", chosen)
    # Some do not come about: a phase was over before the process was found in it.
    assert len(made) + len(missed) == len(chosen) and len(made) >= len(chosen) - 2, missed
    assert all(map(is_same, made)), made
