"""Runs handed to a Ray that is there already, by its own job API: `megarl submit --ray`."""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megarl.core import janitor
from megarl.core.ports import free_port
from megarl.launch.node import own_address

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
UP_S = 240.0
RECIPE = """
run: {{name: job, dir: {folder}/runs}}
cluster: {{platform: cpu}}
model: {{path: {folder}/model, dtype: float32}}
data: {{train: data/sft.jsonl, max_tokens: 128}}
actor: {{micro_batch_tokens: 512}}
train: {{steps: 2, batch_samples: 8}}
"""
# What a run finds in a job's command, up to where it would ask for its devices; Ray does not change what a worker starts with.
LOOK = """
import json, os, sys
import ray
from pathlib import Path
from megarl.cluster.runtime import Runtime
from megarl.core.platform import get_platform
from megarl.core.ray_env import ray_to_join
from megarl.recipe.load import detect_kind, load_recipe
from megarl.run.devices import check_devices
path, on_cuda = Path("recipe.yaml"), ["cluster.platform=cuda", "model.dtype=bfloat16"]
name = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
seen = {
    "address": ray_to_join().address,
    "driver": os.environ.get(name),
    "platform": check_devices(load_recipe(path, on_cuda, detect_kind(path, on_cuda)).recipe).name,
}
with Runtime.start(get_platform("cpu"), Path(sys.argv[1]).parent, 1):
    of_worker = ray.remote(lambda *names: [os.environ.get(each) for each in names]).remote
    seen["worker"], *seen["set"] = ray.get(of_worker(name, "OMP_NUM_THREADS", "OF_THE_JOB"))
Path(sys.argv[1]).write_text(json.dumps(seen))
"""


@dataclass(frozen=True)
class RayCluster:
    """A Ray with a dashboard, and a folder with a recipe that is sent to it. head: host:port that its nodes join by."""

    address: str
    head: str
    folder: Path
    env: dict[str, str]

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "job"

    def popen(self, *words: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "megarl", *words],
            cwd=self.folder,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def megarl(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.popen(*words, **env)
        out, err = process.communicate(timeout=UP_S)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def submit(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.megarl("submit", "recipe.yaml", "--ray", self.address, *words, **env)


def wait(done: Callable[[], bool]) -> None:
    end = time.monotonic() + UP_S
    while not done():
        assert time.monotonic() < end
        select.select([], [], [], 0.1)


@pytest.fixture(scope="module")
def cluster(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    folder = tmp_path_factory.mktemp("ray_jobs")
    shutil.copytree(inputs / "model", folder / "model")
    shutil.copytree(inputs / "data", folder / "data")
    (folder / ".gitignore").write_text("model/\nruns/\nsecret.jsonl\n")
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    temp, mark = Path(f"/tmp/megarl-test-{secrets.token_hex(4)}"), secrets.token_hex(8)
    env = {
        **os.environ,
        janitor.RUN_ID_VARIABLE: mark,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "OMP_NUM_THREADS": "1",
        # Jobs find the python that has megarl, and the dashboard what it asks for beyond Ray's own requirements.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    dashboard, host, port = free_port(), own_address("192.0.2.1"), free_port()
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"),
        *(f"--node-ip-address={host}", f"--temp-dir={temp}", "--num-cpus=2", "--no-monitor"),
        *("--include-dashboard=true", f"--dashboard-port={dashboard}", f"--ray-client-server-port={free_port()}"),
        *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0", "--disable-usage-stats"),
        '--resources={"megarl_cpu_device": 1}',
    ]
    # Jobs inherit it: they are to find this checkout, whichever one is installed.
    stand_ins = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "support" / "ray_dashboard"), str(ROOT)])}
    log = folder.parent / "ray.log"
    with log.open("wb") as out:
        ray = subprocess.Popen(command, env={**env, **stand_ins}, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        wait(lambda: ray.poll() is not None or b"Ray runtime started." in log.read_bytes())
        assert ray.poll() is None, log.read_text()
        del env[janitor.RUN_ID_VARIABLE]
        yield RayCluster(f"http://127.0.0.1:{dashboard}", f"{host}:{port}", folder, env)
    finally:
        ray.kill()
        ray.wait()
        janitor.clean(mark, temp / "none", folders=[temp])


def test_a_job_that_cannot_run_ends_with_the_drivers_exit_code(cluster: RayCluster) -> None:
    """Its data are there, but .gitignore keeps them from being sent."""
    shutil.copy(cluster.folder / "data" / "sft.jsonl", cluster.folder / "secret.jsonl")
    done = cluster.submit("data.train=secret.jsonl", "--follow")
    assert done.returncode == 2, done
    assert "no such data file" in done.stdout and "submission" not in done.stderr
    assert "FAILED, exit code 2" in cluster.megarl("status", str(cluster.run)).stdout


def test_a_cluster_with_a_token_wants_it(cluster: RayCluster) -> None:
    for env, says in (({"RAY_AUTH_TOKEN": "0" * 64}, "another's"), ({"RAY_AUTH_TOKEN": ""}, "not set")):
        done = cluster.megarl("status", str(cluster.run), **env)
        assert done.returncode == 2 and "wants its token" in done.stderr and says in done.stderr


def test_a_job_that_was_submitted_by_hand_joins_its_ray_and_may_run_on_devices(cluster: RayCluster) -> None:
    """Ray shows the command of a job all devices, by a variable under which ranks could not work: they do not get it.

    They get the job's other ones, and where the run sets one itself, its own: Ray would refuse the run for that.
    """
    (cluster.folder / "look.py").write_text(LOOK)
    out = cluster.folder / "runs" / "seen.json"
    out.parent.mkdir(exist_ok=True)
    variables = json.dumps({"env_vars": {"OMP_NUM_THREADS": "3", "OF_THE_JOB": "yes"}})
    job = ("job", "submit", "--address", cluster.address, "--working-dir", str(cluster.folder))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            *job,
            "--runtime-env-json",
            variables,
            "--",
            "python",
            "look.py",
            str(out),
        ],
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=UP_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    joined = {"address": cluster.head, "driver": "1", "platform": "cuda"}
    assert json.loads(out.read_text()) == {**joined, "worker": None, "set": ["1", "yes"]}


def test_a_run_is_followed_to_its_end(cluster: RayCluster) -> None:
    done = cluster.submit("--follow")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert [json.loads(line)["step"] for line in (cluster.run / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert (cluster.run / "hf" / "config.json").exists()


def test_a_stopped_job_leaves_nothing(cluster: RayCluster) -> None:
    done = cluster.submit("run.name=stopped", "train.steps=100000")
    assert done.returncode == 0, done.stderr
    run = cluster.run.with_name("stopped")
    wait((run / "logs" / "rank_0.log").exists)
    run_id = (run / "logs" / "driver.log").read_text().partition("run id ")[2].split(":")[0]
    assert janitor.processes_of(run_id)
    following = cluster.popen("logs", str(run), "--follow")
    assert cluster.megarl("cancel", str(run)).returncode == 0
    following.communicate(timeout=UP_S)
    assert following.returncode == 143
    wait(lambda: not janitor.processes_of(run_id))
