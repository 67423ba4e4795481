"""A teacher behind an address: it is learned from, waited for where it dies, and needed no more for what it has said."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.core.platform import get_platform
from megarl.core.ports import free_port
from megarl.serving.process import start_all
from megarl.serving.server import ProcessPlace, ServerProcess, ServerSpec
from tests.end_to_end.harness import Driver
from tests.support.forked_servers import Copies
from tests.support.served import START_S
from tests.support.turnstile import Turnstile
from tools.make_tiny_model import make_tiny_model

pytestmark = pytest.mark.slow

KEY = "key-of-the-teachers-servers"
TAUGHT = ("algorithm.policy_loss=distill_top", "algorithm.distill_top_k=16", "algorithm.old_logprobs=rollout")
SMALL = ("algorithm.kl_coef=0", "data.eval=null", "report.samples=0", "train.save_every=null")
STEPS = 8


def test_a_teacher_that_dies_in_mid_run_is_waited_for_and_the_policy_comes_to_it(
    launch: Callable[..., Driver], inputs: Path, copies: Copies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asynchronously. That a replay asks no teacher, and gives the same to the bit: tests/rollout/test_teacher.py."""
    monkeypatch.setenv("TEACHER_KEY", KEY)
    make_tiny_model(tmp_path / "teacher", seed=2, hidden_size=64)
    place = ProcessPlace(tmp_path / "logs", KEY)
    spec = ServerSpec(tmp_path / "teacher", "float32", kv_tokens=4096)
    servers: list[ServerProcess] = [
        copies.server(f"teacher {life}", spec, get_platform("cpu"), place) for life in range(2)
    ]
    port = free_port()
    setting = [
        "run.name=taught",
        f"teacher.servers={{urls: ['http://127.0.0.1:{port}'], key_env: TEACHER_KEY}}",
        *TAUGHT,
        *SMALL,
        "rollout.max_staleness=1",
        f"train.steps={STEPS}",
    ]
    try:
        start_all(servers[:1], START_S)
        with Turnstile(servers[0].endpoint.url, port):
            driver = launch(*setting)
            driver.wait_for_step(3)
            os.kill(servers[0].pid, signal.SIGKILL)
        start_all(servers[1:], START_S)
        with Turnstile(servers[1].endpoint.url, port):
            code, out, error = driver.finish()
    finally:
        for server in servers:
            server.stop()
    assert code == 0, out + error
    rows = driver.metrics()[1:]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["rollout/failed"] == row["teacher/failures"] == 0 for row in rows)
    waits = [row["teacher/wait_s_max"] for row in rows]
    assert min(waits) < 0.5 < max(waits), waits
    divergence = [row["actor/pg_loss"] for row in rows]
    assert divergence[-1] < 0.7 * divergence[0], divergence
    assert KEY not in out + error + (driver.folder / "logs" / "driver.log").read_text()
    driver.assert_nothing_left()
