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
from megarl.launch.node import own_address
from megarl.serving.process import free_port

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


@dataclass(frozen=True)
class RayCluster:
    """A Ray with a dashboard, and a folder with a recipe that is sent to it."""

    address: str
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
    dashboard = free_port()
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={free_port()}"),
        *("--node-ip-address=" + own_address("192.0.2.1"), f"--temp-dir={temp}", "--num-cpus=2", "--no-monitor"),
        *("--include-dashboard=true", f"--dashboard-port={dashboard}", f"--ray-client-server-port={free_port()}"),
        *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0", "--disable-usage-stats"),
        '--resources={"megarl_cpu_device": 1}',
    ]
    stand_ins = {"PYTHONPATH": str(ROOT / "tests" / "support" / "ray_dashboard")}
    log = folder.parent / "ray.log"
    with log.open("wb") as out:
        ray = subprocess.Popen(command, env={**env, **stand_ins}, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        wait(lambda: ray.poll() is not None or b"Ray runtime started." in log.read_bytes())
        assert ray.poll() is None, log.read_text()
        del env[janitor.RUN_ID_VARIABLE]
        yield RayCluster(f"http://127.0.0.1:{dashboard}", folder, env)
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
