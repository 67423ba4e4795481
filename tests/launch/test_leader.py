"""The leader of a job and its driver, without nodes."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.core.end_signals import SIGNALS
from megarl.core.errors import MegarlError, StoppedError
from megarl.core.stop import STOP_SIGNAL
from megarl.launch.leader import Allocation, Event, Leader, Nodes, Plan, requeue
from megarl.launch.words import Message

DRIVER = """
import sys, time
time.sleep(0.1)  # imports
from megarl.core.stop import StopRequest
with StopRequest() as stop:
    time.sleep(0.01)
    sys.exit(75 if stop.asked else 3)
"""


def leader_of(folder: Path, *driver: str, restart: int = 0) -> Leader:
    plan = Plan(driver, folder, (), folder / "events.jsonl", folder / "metrics.jsonl", 1.0)
    return Leader(Allocation("7", ("here",), restart, ""), plan)


@pytest.mark.parametrize(("number", "lost"), [(STOP_SIGNAL, ["b"]), (signal.SIGTERM, [])])
def test_a_lost_node_is_one_also_where_the_time_limit_comes_near_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, lost: list[str]
) -> None:
    """The driver has ended with an error; who still says that it is there is asked now."""
    monkeypatch.setattr("megarl.launch.leader.SILENT_S", 0.05)
    leader, nodes = leader_of(tmp_path), SimpleNamespace(names=("a", "b"))
    leader._signal(number, None)
    leader._events.put(("node", 0, Message("alive", "a", "10.0.0.1")))
    found: Any = nodes
    assert leader._lost(found) == lost


def test_what_a_node_prints_that_is_no_text_does_not_end_the_listening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a prolog of the cluster's may, in its own language."""
    (tmp_path / "srun").write_text("#!/bin/bash\nprintf 'gr\\xfcezi\\n'; echo megarl-node ready here 10.0.0.1; read\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    plan = Plan((), tmp_path, (), tmp_path / "events.jsonl", tmp_path / "metrics.jsonl", 1.0)
    nodes = Nodes(Allocation("7", ("here",), 0, ""), plan, "127.0.0.1:1", events)
    assert events.get(timeout=5) == ("node", 0, Message("ready", "here", "10.0.0.1"))
    nodes.close([])
    assert "gr\ufffdezi" in capfd.readouterr().err


def test_a_full_disk_of_the_jobs_log_does_not_end_the_listening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes were taken for lost then, in the end, and the job was queued again."""
    (tmp_path / "srun").write_text("#!/bin/bash\necho warning; echo megarl-node ready here 10.0.0.1; read\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    plan = Plan((), tmp_path, (), tmp_path / "events.jsonl", tmp_path / "metrics.jsonl", 1.0)
    full = Path("/dev/full").open("w")  # noqa: SIM115 -- closing it fails as writing does
    monkeypatch.setattr("sys.stderr", full)
    nodes = Nodes(Allocation("7", ("here",), 0, ""), plan, "127.0.0.1:1", events)
    assert events.get(timeout=5) == ("node", 0, Message("ready", "here", "10.0.0.1"))
    nodes.close([])


def test_a_full_disk_below_its_events_ends_no_job_that_is_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver's exit code was lost, and a job that was to be queued again was over with a stack trace."""
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    leader = leader_of(tmp_path)
    leader._note("driver ended", exit_code=75)
    said = f"could not be written to {tmp_path}/events.jsonl: No space left on device."
    assert capsys.readouterr().err == f"megarl: 'driver ended' of job 7 {said}\n"
    with pytest.raises(
        MegarlError, match=r"'started' of job 7 could not be written to .*: No such file or directory\."
    ):
        leader_of(tmp_path / "gone")._begin()


def test_starts_in_vain_are_not_said_to_have_lost_nodes_where_slurm_ended_them(tmp_path: Path) -> None:
    leader = leader_of(tmp_path)
    for _ in range(3):
        leader._begin()
        leader._note("driver ended", exit_code=143)  # as of a job that makes room for another one
    with pytest.raises(
        MegarlError, match=r"started 3 times .* after step 0\. Each start lost nodes, or SLURM ended it"
    ):
        leader._begin()


def test_nodes_get_the_secret_of_ray_whatever_the_job_was_submitted_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --export=NONE srun hands on nothing, unless it is told to: Ray was open to everybody."""
    (tmp_path / "srun").write_text('#!/bin/bash\nfor word; do [ "$word" = --export=ALL ] && exit 7; done\n')
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    plan = Plan((), tmp_path, (), tmp_path / "events.jsonl", tmp_path / "metrics.jsonl", 1.0)
    nodes = Nodes(Allocation("7", ("here",), 0, ""), plan, "127.0.0.1:1", events)
    assert events.get(timeout=5) == ("nodes ended", 7, None)
    nodes.close([])


def test_nodes_are_heard_where_the_environment_has_srun_label_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user's profile may: every node was up, and after the start deadline nothing had been heard of any."""
    (tmp_path / "srun").write_text('#!/bin/bash\n[ "${SLURM_LABELIO:-}${SLURM_STDOUTMODE:-}" ] || exit 7\n')
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_LABELIO", "1")
    monkeypatch.setenv("SLURM_STDOUTMODE", "out.%t")
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    plan = Plan((), tmp_path, (), tmp_path / "events.jsonl", tmp_path / "metrics.jsonl", 1.0)
    nodes = Nodes(Allocation("7", ("here",), 0, ""), plan, "127.0.0.1:1", events)
    assert events.get(timeout=5) == ("nodes ended", 7, None)
    nodes.close([])


def test_a_request_to_stop_that_comes_before_the_driver_listens_reaches_it(tmp_path: Path) -> None:
    leader, nodes = leader_of(tmp_path, sys.executable, "-c", DRIVER), SimpleNamespace(names=("here",))
    leader._signal(STOP_SIGNAL, None)
    found: Any = nodes
    assert leader._drive(found) == StoppedError.exit_code


def test_a_request_to_stop_that_came_before_the_leader_listens_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's script holds it back until then."""
    monkeypatch.setattr(os, "environ", {**os.environ})  # it has a secret written into it
    numbers = (STOP_SIGNAL, *SIGNALS)
    before, mask = [signal.getsignal(each) for each in numbers], signal.pthread_sigmask(signal.SIG_BLOCK, {STOP_SIGNAL})
    leader = leader_of(tmp_path / "nowhere")
    try:
        signal.pthread_kill(threading.get_ident(), STOP_SIGNAL)  # another thread would not hold it back
        with pytest.raises(MegarlError, match="'started' of job 7 could not be written"):
            leader.run()
        assert leader._events.get(timeout=5) == ("signal", STOP_SIGNAL, None)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize(("restart", "code"), [(0, 3), (2, 4)])
def test_a_driver_knows_that_its_job_was_queued_again(tmp_path: Path, restart: int, code: int) -> None:
    """Nobody is there then: what a run can do without, as wandb's server, does not end it."""
    driver = "import sys; from megarl.core.ray_env import started_again; sys.exit(3 + started_again())"
    found: Any = SimpleNamespace(names=("here",))
    assert leader_of(tmp_path, sys.executable, "-c", driver, restart=restart)._drive(found) == code


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("exit 0", ""),
        ("echo 'Job is pending execution' >&2; exit 1", ""),
        ("echo 'Access/permission denied' >&2; exit 1", "Access/permission denied"),
        ("exit 3", "scontrol ended with 3"),
        ("exec sleep 60", "scontrol has not answered for 0.2 s"),
    ],
)
def test_why_a_job_is_not_queued_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, says: str) -> None:
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{does}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert requeue("7", 0.2 if "sleep" in does else 30) == says
