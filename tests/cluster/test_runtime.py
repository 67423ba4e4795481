"""A Ray that cannot be joined is refused before anything is started, and nothing is left of the attempt."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from megarl.cluster.runtime import Runtime
from megarl.core.errors import UserError
from megarl.core.janitor import RUN_ID_VARIABLE
from megarl.core.platform import Platform
from megarl.core.ray_env import RAY_ADDRESS_VARIABLE


def unused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("head", "it has to be host:port"),
        ("head:ray", "it has to be host:port"),
        (unused_address(), "no Ray answers there"),
    ],
    ids=["no port", "no number", "nobody there"],  # the same in every worker
)
def test_an_address_where_no_ray_is(
    platform: Platform, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, reason: str
) -> None:
    monkeypatch.setenv(RAY_ADDRESS_VARIABLE, address)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(UserError, match=reason) as caught:
        Runtime.start(platform, tmp_path / "run", 1)
    assert address in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert RUN_ID_VARIABLE not in os.environ
