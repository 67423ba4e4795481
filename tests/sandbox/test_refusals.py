"""What is said where sandboxes cannot be, or limits are none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.sandbox import bubblewrap, keeper, refusal
from megarl.sandbox.job import Limits


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("user/max_user_namespaces", "0", "`sysctl -w user.max_user_namespaces=15000`"),
        ("kernel/unprivileged_userns_clone", "0", "`sysctl -w kernel.unprivileged_userns_clone=1`"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "kernel.apparmor_restrict_unprivileged_userns=1: AppArmor",
        ),
    ],
)
def test_the_setting_that_forbids_it_is_named(tmp_path: Path, name: str, value: str, says: str) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("7\n")
    assert "In a container its own rules do" in refusal.explain("bwrap: no", tmp_path)
    (tmp_path / name).write_text(f"{value}\n")
    found = refusal.explain("bwrap: no", tmp_path)
    assert says in found and "makes no sandbox: bwrap: no." in found and "container" not in found


def test_old_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bubblewrap.check_kernel("5.14.0-70.el9")
    with pytest.raises(UserError, match=r"this is Linux 5\.4\.0-26; sandboxes need 5\.14"):
        bubblewrap.check_kernel("5.4.0-26")
    stand_in = tmp_path / "bwrap"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    stand_in.write_text("#!/bin/sh\necho bubblewrap 0.4.1")
    stand_in.chmod(0o755)
    with pytest.raises(UserError, match=r"is bubblewrap 0\.4\.1; sandboxes need 0\.8"):
        bubblewrap.find()
    stand_in.write_text("#!/bin/sh\nexit 3")
    with pytest.raises(UserError, match="--version` does not work"):
        bubblewrap.find()


def test_an_interpreter_that_nobody_may_read_needs_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = bubblewrap.Interpreter.own()
    assert keeper.seen_by(None, own) == own  # who is no other may read its own
    hidden = bubblewrap.Interpreter(tmp_path / "python3", tmp_path, "lib/python3.11")
    hidden.file.touch(0o700)

    def refuse() -> None:
        raise OSError("not permitted")

    monkeypatch.setattr(keeper.kernel, "own_mounts", refuse)
    with pytest.raises(UserError, match=r"cannot be mounted elsewhere: not permitted\. Use an interpreter outside"):
        keeper.seen_by(65534, hidden)


@pytest.mark.parametrize(
    ("limits", "says"),
    [({"timeout_s": 0}, "timeout_s is 0"), ({"memory_bytes": 1000}, "needs 50331648"), ({"open_files": 3}, "needs 16")],
)
def test_limits_that_are_none_are_refused(limits: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Limits(**limits)
