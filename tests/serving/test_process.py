"""Supervised processes, with real ones: readiness, death, deadlines, and what is left after the end."""

from __future__ import annotations

import json
import os
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.core.errors import DeadlineError, WorkerDiedError
from megarl.core.platform import get_platform
from megarl.core.ports import free_port, kept_port
from megarl.core.process_state import started_at, stopped
from megarl.sandbox.watch import usage
from megarl.serving.process import Command, Endpoint, ManagedProcess, process_tree, start_all
from megarl.serving.server import ProcessPlace, ServerProcess, ServerSpec
from tests.support.processes import ended

CHILD = Path(__file__).with_name("http_child.py")
SECRET = "a-secret-that-must-stay-one"

Make = Callable[..., ManagedProcess]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes processes and stops them in the end."""
    made: list[ManagedProcess] = []

    def one(*flags: str, name: str = "server 0", segments: tuple[str, ...] = ()) -> ManagedProcess:
        port = free_port()
        process = ManagedProcess(
            Command(
                name=name,
                argv=(sys.executable, str(CHILD), str(port), *flags),
                log=tmp_path / f"{name}.log",
                endpoint=Endpoint("127.0.0.1", port, "/health"),
                env={"MEGARL_TEST": "1"},
                secret=SECRET,
                segments=segments,
            )
        )
        made.append(process)
        return process

    yield one
    for process in made:
        process.stop(0.1)


def test_a_process_is_ready_when_it_answers(make: Make) -> None:
    process = make()
    process.start()
    process.wait_ready(20)
    assert process.alive()
    assert f"secret of {len(SECRET)} characters" in process.log_tail()


def test_what_rays_processes_hold_back_reaches_those_that_they_start(make: Make) -> None:
    held = {signal.SIGHUP, signal.SIGUSR1}
    process, before = make(), signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    process.wait_ready(20)
    [blocked] = re.findall(r"SigBlk:\s+(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    assert not any(int(blocked, 16) & 1 << number - 1 for number in held)


def test_one_that_found_its_port_taken_is_not_ready_because_the_other_answers(make: Make) -> None:
    first, second = make(), make(name="server 1")
    first.start()
    first.wait_ready(20)
    second.command = replace(first.command, name="server 1", log=second.command.log)
    second.start()
    assert second.wait_exit(20)
    with pytest.raises(WorkerDiedError, match=r"server 1 ended while it started(.|\n)*Address already in use"):
        second.wait_ready(20)


def test_names_of_processes_are_cut_within_a_character(make: Make) -> None:
    """The kernel keeps 15 bytes of a name: whatever another process of the machine is called, ours are found and ended."""
    process = make("name")
    process.start()
    process.wait_ready(20)
    assert Path(f"/proc/{process.pid}/comm").read_bytes() == b"caf\xc3\n"
    assert process_tree(os.getpid()).count(process.pid) == 1
    assert stopped(process.pid) is None and started_at(process.pid) > 0
    assert usage(process.pid, memory=True).memory_bytes > 0
    process.stop(0.1)
    assert not process.alive()


def test_a_process_that_a_signal_without_a_name_ended_says_which(make: Make) -> None:
    process = make("signal=35")
    process.start()
    with pytest.raises(WorkerDiedError, match=r"It was ended by signal 35\."):
        process.wait_ready(20)


def test_a_process_is_waited_for_and_ended_by_one_that_has_many_files_open(make: Make) -> None:
    """As a driver has, whose every peer is a connection, and a collector at its thousandth request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        process = make()
        process.start()
        process.wait_ready(20)
        assert not process.wait_exit(0.01)
        process.stop(0.1)
        assert not process.alive()
    finally:
        for each in many:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_secret_is_on_no_command_line_and_in_no_environment(make: Make) -> None:
    process = make()
    process.start()
    process.wait_ready(20)
    for file in ("cmdline", "environ"):
        assert SECRET.encode() not in Path(f"/proc/{process.pid}/{file}").read_bytes()
    assert b"MEGARL_TEST=1" in Path(f"/proc/{process.pid}/environ").read_bytes()
    assert SECRET not in repr(process.command)


def test_a_process_that_dies_while_starting_is_noticed_at_once(make: Make) -> None:
    process = make("die")
    began = time.monotonic()
    process.start()
    with pytest.raises(WorkerDiedError, match=r"server 0 ended while it started. Its exit code was 3(?s:.)*on purpose"):
        process.wait_ready(60)
    assert time.monotonic() - began < 20


def test_a_process_that_never_answers_is_a_deadline_error(make: Make) -> None:
    process = make("silent")
    process.start()
    with pytest.raises(DeadlineError, match=r"server 0 was not ready within 0.5 s(?s:.)*end of .*server 0.log"):
        process.wait_ready(0.5)


def test_stop_ends_children_that_ignore_it_and_frees_the_port(make: Make) -> None:
    process = make("child", "stubborn")
    process.start()
    process.wait_ready(20)
    tree = process_tree(process.pid)
    assert len(tree) == 2
    process.stop(0.1)
    assert ended(tree)
    with socket.socket() as probe:
        # Connections that were closed may linger on the port; a listener may not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", process.command.endpoint.port))
    process.stop()


def test_stop_removes_shared_memory_that_a_killed_process_left(make: Make) -> None:
    name = f"megarl_test_{secrets.token_hex(4)}"
    process = make(f"segment={name}")
    process.start()
    process.wait_ready(20)
    assert process.shm_names() == {name}
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait_exit(10)
    assert "SIGKILL" in process.epitaph()
    assert (Path("/dev/shm") / name).exists()
    process.stop()
    assert not (Path("/dev/shm") / name).exists()


def test_stop_removes_shared_memory_that_a_process_left_before_anybody_looked(make: Make) -> None:
    segment = Path("/dev/shm") / f"megarl_test_{secrets.token_hex(4)}"
    process = make(f"segment={segment.name}", "silent", segments=(segment.name, "megarl_test_never"))
    process.start()
    deadline = time.monotonic() + 20
    while not segment.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait_exit(10) and segment.exists()
    process.stop()
    assert not segment.exists()


def test_stop_removes_what_a_process_had_on_its_way_to_another(make: Make) -> None:
    process = make()
    process.start()
    process.wait_ready(20)
    segment = Path("/dev/shm") / f"sgl_shm_mm_{process.pid}_{secrets.token_hex(4)}"
    segment.touch()
    process.stop()
    assert not segment.exists()


def test_stop_removes_semaphores_which_the_kernel_lists_under_another_name(make: Make) -> None:
    """The C library makes a semaphore under a passing name, which is what a process's memory map goes on to show."""
    process = make("semaphore")
    process.start()
    process.wait_ready(20)
    (name,) = process.shm_names()
    assert name.startswith("sem.mp-")
    assert (Path("/dev/shm") / name).exists()
    process.stop(0.1)
    assert not (Path("/dev/shm") / name).exists()


def test_shared_memory_of_others_is_left_alone(make: Make) -> None:
    other = Path("/dev/shm") / f"megarl_test_{secrets.token_hex(4)}"
    other.write_bytes(b"x")
    process = make()
    process.start()
    process.wait_ready(20)
    process.stop(0.1)
    assert other.exists()
    other.unlink()


def test_memory_that_a_rank_sends_weights_in_outlives_a_server_that_has_it_mapped(make: Make) -> None:
    """torch names a segment after the process that made it: this one."""
    name = f"torch_{os.getpid()}_{secrets.token_hex(4)}_0"
    process = make(f"segment={name}")
    process.start()
    process.wait_ready(20)
    assert process.shm_names() == frozenset()
    process.stop(0.1)
    assert (Path("/dev/shm") / name).exists()
    (Path("/dev/shm") / name).unlink()


def test_a_process_dies_with_its_parent(tmp_path: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from megarl.core.ports import free_port
from megarl.serving.process import Command, Endpoint, ManagedProcess
port = free_port()
argv = (sys.executable, {str(CHILD)!r}, str(port))
process = ManagedProcess(Command("s", argv, Path({str(tmp_path / "log")!r}), Endpoint("127.0.0.1", port, "/")))
process.start()
process.wait_ready(20)
print(process.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not ended([pid], within_s=0)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert ended([pid])


def test_when_one_of_several_fails_all_are_stopped(make: Make) -> None:
    well, ill = make(name="server 0"), make("die", name="server 1")
    with pytest.raises(WorkerDiedError, match="server 1"):
        start_all([well, ill], 20)
    assert not well.alive()


def test_a_process_that_was_never_started_says_so(make: Make) -> None:
    process = make()
    assert not process.alive()
    assert process.wait_exit(0)
    assert process.shm_names() == frozenset()
    with pytest.raises(WorkerDiedError, match="was not started"):
        assert process.pid
    process.stop()


def test_a_kept_port_is_the_servers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers that start at once would each have found it free until one of them listens, seconds later."""
    drawn = iter((5, 5, 5, 6, 7))
    monkeypatch.setattr("megarl.core.ports.secrets.randbelow", lambda _: next(drawn))
    with kept_port("127.0.0.1") as first, kept_port("127.0.0.1") as second, socket.socket() as server:
        port, other = (each.getsockname()[1] for each in (first, second))
        assert free_port() == other + 1 == port + 2
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        first.close()
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass


def test_what_another_rank_of_a_server_could_not_load_is_found_in_its_log(tmp_path: Path) -> None:
    """As SGLang writes it; its answer is its first rank's alone."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}))
    spec = ServerSpec(tmp_path, "float32", tp=2)
    server = ServerProcess(
        "sglang server 0", spec, get_platform("cpu"), ProcessPlace(tmp_path / "logs", "key", temp=tmp_path)
    )
    assert server.failed_loads() == ""
    log = server.command.log
    log.parent.mkdir()
    failed = (
        "[2026-11-22 15:28:01 TP1] Failed to update parameter online: no room. The full weights are partially updated."
    )
    log.write_text(f"[2026-11-22 15:27:59 TP0] Prefill batch\n{failed}\n[2026-11-22 15:28:02 TP1] Prefill batch\n")
    assert server.failed_loads() == f"--- of weights that were not loaded, in {log}:\n{failed}"
    server.stop()
