"""A Ray that cannot be joined is refused before anything is started, and nothing is left of the attempt."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray

from megarl.cluster.ray_process import DASHBOARD, UNASKED
from megarl.cluster.runtime import Runtime
from megarl.core.errors import UserError
from megarl.core.janitor import RUN_ID_VARIABLE, processes_of
from megarl.core.platform import Platform
from megarl.core.ray_env import RAY_ADDRESS_VARIABLE
from megarl.core.stop import STOP_SIGNAL
from tests.support.processes import ended, heed_interrupts

# Ray's workers cannot import test modules: what is defined here travels whole.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def unused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_an_address_where_something_else_listens(
    platform: Platform, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: bytes
) -> None:
    """Ray's own start would ask it for over ten minutes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(100)
            connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        monkeypatch.setenv(RAY_ADDRESS_VARIABLE, f"127.0.0.1:{listener.getsockname()[1]}")
        answered = threads.submit(answer)
        with pytest.raises(UserError, match="no Ray answers there: something else listens"):
            Runtime.start(platform, tmp_path / "run", 1)
        answered.result()


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("", "is set, and empty"),
        ("head", "it has to be host:port"),
        ("head:ray", "it has to be host:port"),
        (None, "no Ray answers there"),
    ],
    ids=["empty", "no port", "no number", "nobody there"],
)
def test_an_address_where_no_ray_is(
    platform: Platform, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str | None, reason: str
) -> None:
    if address is None:
        address = unused_address()  # now: what is free as tests are collected others may have taken since
    monkeypatch.setenv(RAY_ADDRESS_VARIABLE, address)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(UserError, match=reason) as caught:
        Runtime.start(platform, tmp_path / "run", 1)
    assert address in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert RUN_ID_VARIABLE not in os.environ


def test_spares_without_nodes_are_refused(platform: Platform, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(RAY_ADDRESS_VARIABLE, raising=False)
    with pytest.raises(UserError, match=r"cluster\.spares is 1, and the run is on this machine alone"):
        Runtime.start(platform, tmp_path / "run", 1, spares=1)
    assert RUN_ID_VARIABLE not in os.environ


def seen_in(packages: Sequence[str]) -> tuple[list[str], bool, str | None]:
    """In a process of Ray's: which of these it has loaded, whether they are themselves where somebody asks for them, and the
    folder that a shell notes for all that it starts.
    """
    before = [name for name in packages if name in sys.modules]
    return before, all(importlib.import_module(name).__file__ for name in packages), os.environ.get("PWD")


@pytest.mark.slow
def test_a_ray_that_was_too_slow_is_started_once_more(
    platform: Platform, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray's own processes are there by then: nothing of the first start is left. Its dashboard's packages are not looked for.

    Neither time is there more of Ray's than a run needs, nor in its workers.
    """
    from ray._private import services

    looked_for: list[str] = []

    class Looks:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            looked_for.append(name)

    monkeypatch.delenv("PWD", raising=False)
    monkeypatch.delitem(sys.modules, DASHBOARD, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Looks, *sys.meta_path])

    real, asked = services.get_node, 0

    def slow(*words: object) -> object:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise RuntimeWarning("The current node timed out during startup.")  # nothing that Ray waits on for
        return real(*words)

    monkeypatch.setattr(services, "get_node", slow)
    with Runtime.start(platform, tmp_path / "run", 1) as runtime:
        run_id = runtime.run_id
        running = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_of(run_id)]
        assert sum(b"raylet/raylet" in words.split(b"\0")[0] for words in running) == 1
        assert sum(words.split(b"\0")[0].endswith(b"gcs_server") for words in running) == 1
        assert not [words for words in running if b"monitor.py" in words or b"dashboard.py" in words]
        assert not runtime.nodes.services.ended()
        # Through a shell, which Ray's setup of a worker becomes first, it would have been begun twice.
        assert ray.get(ray.remote(seen_in).remote(UNASKED)) == ([], True, None)
    assert "It is started once more" in caplog.text and DASHBOARD not in looked_for
    assert processes_of(run_id) == []


def come_up(code: str, run: Path) -> tuple[Path, subprocess.Popen[str]]:
    """A process with a Ray of its own that has said that it is up, and its temporary folder."""
    env = {name: value for name, value in os.environ.items() if name != RAY_ADDRESS_VARIABLE}
    short = Path(tempfile.mkdtemp())  # Ray's sockets are in it
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**env, "TMPDIR": str(short)},
        preexec_fn=heed_interrupts,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return short, process


# Waits in the midst of Ray's start: where Ray waits for its node, or in a hook of a fork, where Python drops exceptions.
STARTING = """
import os, signal, sys, time
from pathlib import Path
from megarl.cluster.runtime import Runtime
from megarl.core.interrupts import Interrupts, as_error
from ray._private import services
from tests.support.platforms import chosen
waited = False
def wait(*words):
    global waited
    if not waited and signal.getsignal(signal.SIGTERM).__module__.startswith("ray."):
        waited = True
        print("up", flush=True)
        time.sleep(60)
    return real(*words)
real = {real}
with Interrupts():
    try:
        {hook}
        with Runtime.start(chosen(), Path(sys.argv[1]), 1):
            print("started")
    except KeyboardInterrupt as error:
        print(as_error(error).exit_code)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("real", "hook"),
    [("services.get_node", "services.get_node = wait"), ("int", "os.register_at_fork(before=wait)")],
    ids=["where Ray waits", "where exceptions are dropped"],
)
def test_sigterm_while_ray_starts_is_heard_as_ever(real: str, hook: str, tmp_path: Path) -> None:
    short, process = come_up(STARTING.format(real=real, hook=hook), tmp_path / "run")
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "143\n"), error
    assert error.count("megarl: SIGTERM: ending everything in order") == 1 and "Exception ignored" not in error
    assert psutil.wait_procs(started, timeout=10)[1] == []  # whoever is nobody's child now is reaped a moment later
    short.rmdir()  # nothing is in it


# Waits where Ray does, for its processes to end, and is told so; and once more when Ray has ended.
ENDING = """
import os, signal, sys, time
from pathlib import Path
from megarl.cluster.runtime import Runtime
from megarl.core.interrupts import Interrupts, as_error
from ray._private.node import Node
from tests.support.platforms import chosen
real = Node.kill_all_processes
def wait(*words, **settings):
    time.sleep(0.5)
    print("up", flush=True)
    sys.stdin.readline()
    real(*words, **settings)
Node.kill_all_processes = wait
with Interrupts():
    try:
        with Runtime.start(chosen(), Path(sys.argv[1]), 1):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
    except KeyboardInterrupt as error:
        os.kill(os.getpid(), signal.SIGTERM)
        print(as_error(error).exit_code)
"""


@pytest.mark.slow
def test_sigterm_while_ray_ends_and_afterwards_ends_nothing_at_once(tmp_path: Path) -> None:
    """As of a scheduler that does not wait for what a Ctrl-C has begun."""
    short, process = come_up(ENDING, tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate("go on\n", timeout=60)
    assert (process.returncode, out) == (0, "130\n"), error
    assert error.count("ending everything in order") == 1
    short.rmdir()  # nothing is in it


# Listens to a request to stop, and waits.
WAITING = """
import sys
from pathlib import Path
from megarl.cluster.runtime import Runtime
from megarl.core.stop import StopRequest
from tests.support.platforms import chosen
with StopRequest() as stop, Runtime.start(chosen(), Path(sys.argv[1]), 1):
    print("up", flush=True)
    sys.stdin.readline()
    print(stop.asked, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_rays_processes_outlive_a_request_to_stop_and_not_a_driver_that_is_killed_together_with_its_janitor(
    tmp_path: Path,
) -> None:
    """The request comes to all of a group, as of `timeout -s USR1`. Ray's agents asked a GCS that was gone for a minute."""
    short, process = come_up(WAITING, tmp_path / "run")
    driver = psutil.Process(process.pid)
    started = driver.children(recursive=True)
    [raylet] = [each for each in started if each.name() == "raylet"]
    [guard] = [each for each in driver.children() if "megarl.core.janitor" in each.cmdline()]
    assert len([each for each in raylet.children() if "Agent" in each.cmdline()[0]]) == 2
    os.killpg(process.pid, STOP_SIGNAL)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "True\n"
    assert [each.name() for each in started if each.status() == psutil.STATUS_ZOMBIE] == []
    guard.kill()
    process.kill()
    process.communicate(timeout=60)
    assert ended([each.pid for each in started], within_s=10)
    shutil.rmtree(short)
