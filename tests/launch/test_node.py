"""A node's own process, as far as it gets without Ray: what it says, and when it ends."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.core import janitor
from megarl.core.ports import free_port
from megarl.launch.node import NodeSpec, few_cpus, main, own_address, ray_command
from megarl.launch.words import parse_line
from tests.support.processes import heed_interrupts
from tests.support.terminal import Terminal

# A shell with a job in its background, and somebody who types.
SHELL = """
import os, sys
from megarl.launch.node import input_ended
job = os.fork()
if not job:
    os.setpgid(0, 0)
    os._exit(10 + input_ended(0.2))
_, status = os.waitpid(job, os.WUNTRACED)
sys.exit(99 if os.WIFSTOPPED(status) else os.WEXITSTATUS(status))
"""
# A node that a signal comes to as it starts its janitor, and another one as it cleans.
SIGNALLED = """
import os, signal, sys
from megarl.core import janitor
from megarl.launch.node import main

def hit(name, number):
    real = getattr(janitor, name)
    def after(*args, **more):
        os.kill(os.getpid(), number)
        return real(*args, **more)
    setattr(janitor, name, after)

hit("start", signal.SIGTERM)
hit("clean", signal.SIGINT)
sys.exit(main(sys.argv[1:]))
"""
FAR = "192.0.2.1"  # no machine has this address (RFC 5737)


def start(temp: Path, head: str, deadline_s: float, *more: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megarl.launch.node", "--head", head, "--run-id", f"test-{temp.parent.name}"]
    return subprocess.Popen(
        [*command, "--temp", str(temp), "--deadline", str(deadline_s), *more],
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def words(out: str) -> list[str]:
    return [message.word for message in map(parse_line, out.splitlines()) if message is not None]


def test_a_head_that_is_not_reached_is_named(tmp_path: Path) -> None:
    node = start(tmp_path / "temp", f"{FAR}:9", 0.5)
    assert node.wait(30) == 1
    out, err = node.communicate()
    assert words(out) == ["started", "failed"]
    assert f"cannot reach the head at {FAR}:9" in err
    assert not (tmp_path / "temp").exists()


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ("head1:26000", "'head1:26000' has to be address:port, with the IPv4 address"),
        ("10.0.0.1", "'10.0.0.1' has to be address:port"),
        ("10.0.0.1:70000", "names no port from 1 to 65535"),
    ],
)
def test_a_head_by_name_is_refused(head: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No node took itself for the head: each waited for it until its deadline, the head's own node as well."""
    with pytest.raises(SystemExit) as ended:
        main(["--head", head, "--run-id", "x", "--temp", "/tmp/x"])
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_a_node_with_fewer_than_two_cpus_a_gpu_is_named(tmp_path: Path) -> None:
    cpus = len(os.sched_getaffinity(0))
    env = {"SLURMD_NODENAME": "node3", "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(cpus)))}
    for more, warned in (((), True), (("--resource", "megarl_cpu_device=2"), False)):
        node = start(tmp_path / "temp", f"{FAR}:9", 60.0, *more, **env)
        err = node.communicate(timeout=30)[1]
        assert node.returncode == 0
        named = re.search(r"warning: node3 \(\S+\) gives this job (\d+) CPUs for (\d+) GPUs.*--cpus-per-task", err)
        assert (named is not None) == warned
        assert named is None or named.groups() == (str(cpus), str(cpus))


def test_two_cpus_a_gpu_are_enough() -> None:
    for cpus, gpus, few in ((1, 8, True), (15, 8, True), (16, 8, False), (1, 0, False)):
        assert bool(few_cpus(NodeSpec(FAR, "id", Path("/tmp/x"), cpus, {}, 1.0), gpus)) == few


def test_a_folder_that_is_there_already_is_nobodys_to_take(tmp_path: Path) -> None:
    (tmp_path / "temp").mkdir()
    node = start(tmp_path / "temp", f"{FAR}:9", 60.0)
    assert node.wait(30) == 1
    out, err = node.communicate()
    assert words(out) == ["started", "failed"] and "cannot make the folder" in err
    assert (tmp_path / "temp").exists()


def test_the_end_of_standard_input_is_the_end_of_the_node(tmp_path: Path) -> None:
    node = start(tmp_path / "temp", f"{FAR}:9", 60.0)
    assert node.stdout is not None
    assert words(node.stdout.readline()) == ["started"]
    out, err = node.communicate(timeout=30)
    assert (node.returncode, out, err) == (0, "", "")
    assert not (tmp_path / "temp").exists()
    assert not janitor.processes_of(f"test-{tmp_path.name}")


def test_a_node_whose_terminal_is_closed_ends_in_order(tmp_path: Path) -> None:
    temp = tmp_path / "temp"
    command = [sys.executable, "-m", "megarl.launch.node", "--head", f"{FAR}:9", "--run-id", f"test-{tmp_path.name}"]
    with Terminal([*command, "--temp", str(temp)], preexec_fn=heed_interrupts) as terminal:
        terminal.read_until(lambda shown: words(shown) == ["started"] and temp.exists(), 30.0)
        terminal.close()
        assert terminal.process.wait(30) == 0
    assert not temp.exists() and not janitor.processes_of(f"test-{tmp_path.name}")


def test_signals_between_the_folder_and_its_removal_leave_nothing(tmp_path: Path) -> None:
    """SIGHUP follows the end of a terminal: it came into the cleaning, or between the folder and its janitor."""
    temp = tmp_path / "temp"
    command = [sys.executable, "-c", SIGNALLED, "--head", f"{FAR}:9", "--run-id", f"test-{tmp_path.name}"]
    done = subprocess.run(
        [*command, "--temp", str(temp)],
        input="",
        capture_output=True,
        text=True,
        timeout=30,
        preexec_fn=heed_interrupts,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not temp.exists() and not janitor.processes_of(f"test-{tmp_path.name}")


def test_what_is_typed_for_another_job_of_the_terminal_neither_stops_nor_ends_the_node() -> None:
    """The system stops a job of the background that reads its terminal: Ray's processes on this machine, too."""
    shell, terminal = pty.fork()
    if not shell:
        os.execv(sys.executable, [sys.executable, "-c", SHELL])
    os.write(terminal, b"megarl train\n")
    assert os.waitstatus_to_exitcode(os.waitpid(shell, 0)[1]) == 10
    os.close(terminal)


def test_a_killed_node_leaves_no_folder(tmp_path: Path) -> None:
    temp = tmp_path / "temp"
    node = start(temp, f"{FAR}:9", 60.0)
    assert node.stdout is not None and node.stdin is not None
    assert words(node.stdout.readline()) == ["started"]
    while not (guards := [pid for pid in children(node.pid) if "megarl.core.janitor" in command_line(pid)]):
        assert node.poll() is None
    node.kill()
    node.communicate(timeout=30)
    janitor.await_exit(guards, 10.0)
    assert not temp.exists()


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_the_head_and_its_workers_take_no_port_that_another_job_might_have() -> None:
    """Ray's defaults are the same on every node: 6379, 10001, 10002 to 19999, 52365."""
    head = f"127.0.0.1:{free_port()}"
    spec = NodeSpec(head, "id", Path("/tmp/x"), 4, {"megarl_cpu_device": 2.0}, 1.0)
    first, second = ray_command(spec, "127.0.0.1"), ray_command(spec, "127.0.0.2")
    assert "--head" in first and f"--port={head.split(':')[1]}" in first
    assert f"--address={head}" in second and "--head" not in second
    for command in (first, second):
        assert {"--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"} <= set(command)
        assert '--resources={"megarl_cpu_device": 2.0}' in command
    [client] = [word for word in first if word.startswith("--ray-client-server-port=")]
    assert client != "--ray-client-server-port=10001"


def test_the_address_on_the_way_to_a_peer_is_this_machines() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
