"""The servers of a profile: what they leave where it is killed is known to whoever removes it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.core.janitor import RUN_ID_VARIABLE
from megarl.core.platform import get_platform
from megarl.profiling import servers


class FakeProcess:
    """A server or router that has shared memory of its own, and is only told to stop."""

    def __init__(self, *given: Any) -> None:
        self.place = given[-1]

    def shm_names(self) -> frozenset[str]:
        return frozenset({"sglang_loads"})

    def stop(self) -> None:
        return None


def test_shared_memory_of_servers_is_removed_where_a_profile_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "ServerProcess", FakeProcess)
    monkeypatch.setattr(servers, "RouterProcess", FakeProcess)
    scratch: Any = SimpleNamespace(run_id="r", registry=tmp_path / "shared_memory.txt")
    before = []
    monkeypatch.setattr(servers, "start_all", lambda *_: before.extend(scratch.registry.read_text().split()))
    with servers.serving(tmp_path, "float32", get_platform("cpu"), 2, tmp_path, 1.0, scratch) as pool:
        assert before == ["sglang_loads"]
        assert set(scratch.registry.read_text().split()) == {"sglang_loads"}
        places = [each.place for each in (*pool.servers, pool.router)]  # type: ignore[attr-defined]
        assert all(place.env[RUN_ID_VARIABLE] == "r" for place in places)
