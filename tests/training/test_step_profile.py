"""torch's profiler on a rank that learns: what its trace and its table show."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from megarl.training.step_profile import StepProfile
from tests.training.harness import VOCAB
from tests.training.samples import examples, shards


@pytest.mark.parametrize("memory", [False, True])
def test_a_trace_names_what_a_rank_did_and_a_table_what_it_costs(
    memory: bool, rank: Any, spec: Any, tmp_path: Path
) -> None:
    rank.build("actor", spec)
    [shard], [columns] = shards([examples([9, 17], VOCAB)])
    profile = StepProfile(memory=memory)
    rank.logprobs("actor", shard)
    rank.update("actor", shard, columns)
    file = tmp_path / "profile" / "step_000003_rank_0.json.gz"
    assert profile.end(file) == ""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"actor/logprobs", "actor/update", "aten::mm"} <= names
    assert ("[memory]" in names) == memory
    [update] = [
        event for event in events if event.get("name") == "actor/update" and event.get("cat") == "user_annotation"
    ]
    within = [each for each in events if each.get("name") == "aten::mm" and each["ts"] >= update["ts"]]
    assert within and all("Input Dims" in each["args"] for each in within)
    table = (file.parent / "step_000003_rank_0.txt").read_text()
    assert "aten::mm" in table and "Self CPU" in table


def test_a_profile_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")
    assert "exists" in StepProfile(memory=False).end(tmp_path / "profile" / "step.json.gz")
