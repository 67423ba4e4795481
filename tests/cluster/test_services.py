"""Ray's own processes are killed under a run: they are named within two seconds, and not what dies of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ray

from megarl.cluster.process import ProcessFacts, ProcessSpec
from megarl.cluster.runtime import Runtime
from megarl.cluster.services import RayDiedError, Service, Services
from megarl.cluster.waits import Call, Waiter, Worker
from megarl.core import janitor
from megarl.core.platform import Platform
from megarl.core.timing import PhaseTimer

# Ray's workers cannot import test modules: what is defined here travels whole.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Hanging:
    """An actor that never answers."""

    def pid(self) -> int:
        return os.getpid()

    def hang(self) -> None:
        time.sleep(600)


def test_a_service_that_was_stopped_is_let_go_on_and_one_that_has_ended_is_no_matter() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as stopped, subprocess.Popen(["true"]) as gone:
        stopped.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
        services = Services([Service(str(each.pid), each.pid, os.pidfd_open(each.pid)) for each in (gone, stopped)])
        gone.wait()
        services.let_go_on()
        stopped.communicate(timeout=10)
        services.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_runtime_ends_while_a_service_of_rays_is_stopped(platform: Platform, tmp_path: Path, name: str) -> None:
    """Ray waited for it for ever."""
    with Runtime.start(platform, tmp_path, num_devices=1) as runtime:
        pid = runtime.nodes.services.pids[name]
        os.kill(pid, signal.SIGSTOP)
        late = threading.Timer(60.0, os.kill, (pid, signal.SIGCONT))  # who hangs all the same, fails
        late.start()
    assert late.is_alive()
    late.cancel()
    assert not janitor.processes_of(runtime.run_id)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "says"), [("raylet", "Ray's raylet"), ("gcs_server", "Ray's GCS")])
def test_a_service_of_rays_that_is_killed_is_named_at_once(
    platform: Platform, tmp_path: Path, name: str, says: str
) -> None:
    with Runtime.start(platform, tmp_path, num_devices=1) as runtime:
        run_id = runtime.run_id
        assert set(runtime.nodes.services.pids) == {"raylet", "gcs_server"}
        handle = ray.remote(Hanging).options(num_cpus=0).remote()
        worker = Worker(
            handle, ProcessSpec("rank 0", runtime.logs), ProcessFacts(ray.get(handle.pid.remote()), "here", "127.0.0.1")
        )
        waiter = Waiter(PhaseTimer(), runtime.nodes)
        # A server's supervisor dies with the raylet, which must not be blamed for it.
        blamed: list[str] = []
        waiter.watches[handle.hang.remote()] = blamed.append
        pid, killed = runtime.nodes.services.pids[name], []

        def kill() -> None:
            killed.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)

        threading.Timer(0.5, kill).start()
        with pytest.raises(RayDiedError) as caught:
            waiter.wait([Call(worker, handle.hang.remote())], phase="update", role="actor", deadline_s=60)
        assert time.monotonic() - killed[0] < 2.0
        assert says in str(caught.value) and f"pid {pid}, by signal 9" in str(caught.value)
        assert blamed == []
    assert janitor.processes_of(run_id) == []


def test_a_process_that_ends_says_how() -> None:
    codes = {"raylet": "exit code 3", "gcs_server": "by signal 15"}
    started = [
        subprocess.Popen([sys.executable, "-c", code])
        for code in ("raise SystemExit(3)", "import os; os.kill(os.getpid(), 15)")
    ]
    services = Services(
        [Service(name, each.pid, os.pidfd_open(each.pid)) for name, each in zip(codes, started, strict=True)]
    )
    for each in started:
        os.waitid(os.P_PID, each.pid, os.WEXITED | os.WNOWAIT)
    told = services.ended()
    for (_, how), each in zip(codes.items(), started, strict=True):
        assert f"(pid {each.pid}, {how})" in told
        each.wait()
    services.close()
    assert services.ended() == ""


def test_services_of_another_node_are_not_found() -> None:
    assert Services.find("0" * 56).pids == {}
