"""A sample of what bench/save_kills shows, and that its parts of a save are those that are meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.save_kills import is_good
from bench.support.killed_saves import part_of
from tests.support.forked_ranks import Ranks


@pytest.mark.slow
def test_six_kills_in_saves_lose_at_most_a_step_and_no_bit(ranks: Ranks, tmp_path: Path) -> None:
    """The benchmark exits with an error where a checkpoint is chosen that is not whole."""
    assert ranks.run("tests.bench.some_save_kills", 1, 6, tmp_path, log=tmp_path / "log") == ""
    sides = json.loads((tmp_path / "save_kills.json").read_text())["sides"]
    assert [side["kills"] for side in sides.values()] == [3, 3]
    assert all(sum(side["parts"].values()) == 3 and side["steps"] >= 2 for side in sides.values())


@pytest.mark.parametrize(
    ("event", "name", "writes", "before", "part"),
    [
        ("shutil.rmtree", ".tmp-step_000003", False, "beginning", "beginning"),
        ("os.mkdir", ".tmp-step_000003/actor", False, "beginning", "beginning"),
        ("open", ".tmp-step_000003/actor/__0_0.distcp", True, "beginning", "writing"),
        ("open", ".tmp-step_000003/actor/__0_0.distcp", False, "writing", "writing"),
        ("open", ".tmp-step_000003/actor/megarl.json", True, "writing", "manifest"),
        ("open", ".tmp-step_000003/state.json", True, "manifest", "marker"),
        ("open", ".tmp-step_000003/state.json", False, "marker", "to the disk"),
        ("os.rename", ".tmp-step_000003/actor/.metadata.tmp", False, "writing", "writing"),
        ("os.rename", ".tmp-step_000003", False, "to the disk", "renaming"),
        ("open", "", False, "renaming", "renamed"),
        ("open", "step_000001/COMMITTED", False, "renamed", "pruning"),
        ("os.rename", "step_000001", False, "pruning", "pruning"),
        ("os.remove", "COMMITTED", False, "pruning", "pruning"),
    ],
)
def test_the_part_of_a_save_is_told_by_what_is_done(
    event: str, name: str, writes: bool, before: str, part: str
) -> None:
    folder = Path("/run/checkpoints")
    path = Path(name) if event == "os.remove" else folder / name
    assert part_of(event, path, writes, before, folder) == part
    assert part_of("open", Path("/elsewhere"), writes, before, folder) is None


@pytest.mark.parametrize(
    ("name", "change", "good"),
    [
        ("waited for", {}, True),
        ("waited for", {"repeated_most": 2}, False),
        ("beside training", {"repeated_most": 2}, True),
        ("beside training", {"repeated_most": 3}, False),
        ("waited for", {"others_chosen": 1}, False),
        ("waited for", {"not_to_the_bit": 1}, False),
        ("waited for", {"left_over": [".tmp-step_000002"]}, False),
    ],
)
def test_what_is_lost_is_bad(name: str, change: dict[str, object], good: bool) -> None:
    fine = {"others_chosen": 0, "not_to_the_bit": 0, "left_over": [], "repeated_most": 1}
    assert is_good({"sides": {name: {**fine, **change}}}) is good
