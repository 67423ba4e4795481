"""The share that a server is told where others hold a part of its devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.placement.rates import Rates
from megarl.serving.device_share import BESIDE, STARTED, Held, devices_in_use, share_flags

H100 = 81920.0  # MiB
FLAG = "--mem-fraction-static"


@pytest.mark.parametrize(("share", "used"), [("0.75", 6000.0), ("0.3", 40000.0)])
def test_a_server_that_starts_again_takes_as_much_as_the_first_time(share: str, used: float) -> None:
    """SGLang's own: weights and cache are that share of what is free once its context is there."""
    first = float(share) * (H100 - 512)
    for argv in ([FLAG, "0.9", FLAG, share], [f"{FLAG}={share}", "--tp-size", "2"]):
        flag, told = share_flags(argv, [Held(H100, 100.0), Held(H100, used)])
        assert flag == FLAG
        assert float(told) * (H100 - 512 - used) == pytest.approx(first, rel=2e-3)


def test_room_is_left_for_what_comes_beside() -> None:
    _, told = share_flags([FLAG, "0.75"], [Held(H100, 40000.0)])
    left = H100 - 512 - 40000
    assert (1 - float(told)) * left == pytest.approx(BESIDE, abs=0.001 * left)


@pytest.mark.parametrize(
    ("argv", "used"),
    [
        ([FLAG, "0.75"], 900.0),  # nobody else is there
        ([], 6000.0),  # SGLang chooses
        ([FLAG, "0.75", "--nnodes", "2"], 6000.0),  # the other node's would not know
        ([FLAG, "0.75"], 80000.0),  # nothing is left, and SGLang says so
        ([FLAG, "0.98"], 6000.0),  # a user's own, which leaves less room than is left here
        ([FLAG, "much"], 6000.0),
        ([FLAG], 6000.0),
    ],
)
def test_other_servers_are_told_nothing_more(argv: list[str], used: float) -> None:
    assert share_flags(argv, [Held(H100, used)]) == ()
    assert share_flags(argv, []) == ()


def test_what_is_held_beside_a_share_is_what_plans_count() -> None:
    rates = Rates()
    assert rates.started_bytes / 2**20 == STARTED
    assert (rates.server_bytes - rates.started_bytes) / 2**20 == BESIDE


def test_the_drivers_program_is_asked_of_this_process_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    program.write_text(f'#!/bin/sh\necho "$@" > {asked}\nprintf "81559, 603\\n81559, 41000\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5f2")
    assert devices_in_use() == [Held(81559.0, 603.0), Held(81559.0, 41000.0)]
    assert asked.read_text().split() == [
        *("-i", "3,GPU-5f2", "--query-gpu=memory.total,memory.used", "--format=csv,noheader,nounits")
    ]
    for answer in ("echo '[N/A], [N/A]'", "echo 1", "exit 6"):
        program.write_text(f"#!/bin/sh\n{answer}\n")
        assert devices_in_use() == []
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices_in_use() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices_in_use() == []
