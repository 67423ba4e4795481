"""Writers: what is on disk after a step, after a resume, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.core.errors import MegarlError, StoppedError, UserError
from megarl.recipe.supervised import SftRecipe
from megarl.report.history import METRICS_FILE, read_history
from megarl.report.writers import JsonlWriter, TensorBoardWriter, WandbWriter, Writers, open_writers
from megarl.serving.process import process_tree
from tests.support.processes import ended


class Recorder:
    """Keeps what it is given; may fail on closing."""

    def __init__(self, fails: bool = False) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self.fails = fails

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self, failed: bool) -> None:
        self.closed += 1
        if self.fails:
            raise OSError("disk full")


def recipe(**report: Any) -> SftRecipe:
    return SftRecipe.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train": "sft.jsonl"},
            "train": {"steps": 3, "batch_samples": 2},
            "report": report,
        }
    )


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, pytest.approx(event.value)) for event in accumulator.Scalars(name)]


def test_jsonl_is_on_disk_after_each_step_and_keeps_every_digit(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "run" / METRICS_FILE)
    writer.write(1, {"reward/mean": 0.1 + 0.2, "actor/grad_norm": float("inf")})
    (line,) = (tmp_path / "run" / METRICS_FILE).read_text().splitlines()
    assert json.loads(line) == {"step": 1, "reward/mean": 0.30000000000000004, "actor/grad_norm": None}
    writer.close()


def test_jsonl_resumes_after_the_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / METRICS_FILE
    for resumed, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        writer = JsonlWriter(file, resumed)
        for step in steps:
            writer.write(step, {"reward/mean": 10 * (resumed or 0) + step})
        writer.close()
    assert [(row["step"], row["reward/mean"]) for row in read_history(file)] == [(1, 1), (2, 2), (3, 23), (4, 24)]


def test_jsonl_begins_anew_without_a_resume(tmp_path: Path) -> None:
    for step in (1, 2):
        writer = JsonlWriter(tmp_path / METRICS_FILE)
        writer.write(step, {})
        writer.close()
    assert read_history(tmp_path / METRICS_FILE) == [{"step": 2}]


@pytest.mark.parametrize(("resumed", "kept"), [(2, [(1, 0.1), (2, 0.2)]), (None, [])])
def test_tensorboard_reads_what_was_written_and_forgets_what_is_written_again(
    tmp_path: Path, resumed: int | None, kept: list[tuple[int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = TensorBoardWriter(tmp_path)
    for step in (1, 2, 3):
        first.write(step, {"reward/mean": step / 10})
    first.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 0.1), (2, 0.2), (3, 0.3)]
    again = (resumed or 0) + 1
    # On a machine whose clock is behind.
    now = time.time() - 3600
    monkeypatch.setattr(time, "time", lambda: now)
    second = TensorBoardWriter(tmp_path, resumed_step=resumed)
    second.write(again, {"reward/mean": 0.9})
    second.close()
    assert scalars(tmp_path, "reward/mean") == [*kept, (again, 0.9)]


def test_tensorboard_is_written_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from megarl.report.writers import TensorBoardWriter as W; "
        "w = W(Path(sys.argv[1])); w.write(1, {'reward/mean': 1.0}); w.close(); assert 'torch' not in sys.modules"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code, str(tmp_path)]) == 0
    assert scalars(tmp_path, "reward/mean") == [(1, 1.0)]


def test_unknown_names_reach_no_writer() -> None:
    recorder = Recorder()
    writers = Writers(recorder)
    with pytest.raises(MegarlError, match="reward/average"):
        writers.write(1, {"reward/mean": 1.0, "reward/average": 1.0})
    assert recorder.rows == []
    writers.write(1, {"reward/mean": 1.0})
    assert recorder.rows == [(1, {"reward/mean": 1.0})]


def test_close_reaches_everybody_once_although_one_fails() -> None:
    recorders = [Recorder(), Recorder(fails=True), Recorder()]
    writers = Writers(*recorders)
    with pytest.raises(OSError, match="disk full"):
        writers.close()
    writers.close()
    assert [recorder.closed for recorder in recorders] == [1, 1, 1]


def test_a_disk_that_fails_ends_a_run_with_what_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server of files does that was started anew: the system says neither what was written nor where."""
    writers = [JsonlWriter(tmp_path / METRICS_FILE), TensorBoardWriter(tmp_path / "tensorboard")]
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writers[0]._file.fileno())  # type: ignore[union-attr]
    os.close(full)

    def stale() -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(writers[1]._file, "flush", stale)
    for writer, place, why in zip(writers, (METRICS_FILE, "tensorboard"), ("No space left", "Stale file"), strict=True):
        with pytest.raises(MegarlError, match=rf"metrics of step 3 .* written to {tmp_path}/{place}: {why}"):  # noqa: SIM117
            with Writers(writer) as all_of_them:
                all_of_them.write(3, {"reward/mean": 1.0})


def test_the_recipe_decides_who_writes(tmp_path: Path) -> None:
    open_writers(tmp_path / "a", recipe()).close()
    assert (tmp_path / "a" / METRICS_FILE).exists() and list((tmp_path / "a" / "tensorboard").glob("events*"))
    open_writers(tmp_path / "b", recipe(tensorboard=False)).close()
    assert [path.name for path in (tmp_path / "b").iterdir()] == [METRICS_FILE]


def test_wandb_missing_is_a_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="wandb is not installed"):
        open_writers(tmp_path, recipe(tensorboard=False, wandb={"project": "p"}))
    assert not (tmp_path / METRICS_FILE).exists()


class FakeRun:
    """A run of wandb whose server may answer no more when it is finished."""

    def __init__(self, folder: Path, answers: bool = True) -> None:
        self.dir = str(folder / "wandb" / "run-1" / "files")
        self.answers = answers
        self.exit_codes: list[int | None] = []

    def finish(self, exit_code: int | None = None) -> None:
        self.exit_codes.append(exit_code)
        if not self.answers:
            raise TimeoutError("Timed out finishing run.")


class FakeWandb:
    """Stands in for wandb.init: keeps what it is asked, and refuses to begin online where there is no server."""

    def __init__(self, run: FakeRun, reached: bool = True) -> None:
        self.run, self.reached = run, reached
        self.asked: list[dict[str, Any]] = []

    def init(self, **asked: Any) -> FakeRun:
        self.asked.append(asked)
        if not self.reached and asked["mode"] != "offline":
            raise wandb.errors.CommError("Timed out")
        return self.run


def with_wandb(monkeypatch: pytest.MonkeyPatch, run: FakeRun, reached: bool = True) -> FakeWandb:
    fake = FakeWandb(run, reached)
    monkeypatch.setenv("WANDB_API_KEY", "key")
    monkeypatch.setattr(wandb, "init", fake.init)
    return fake


@pytest.mark.parametrize(
    ("error", "exit_code"), [(None, 0), (StoppedError("asked to"), 0), (MegarlError("a rank died"), 1)]
)
def test_wandb_shows_a_run_as_failed_that_has_failed(
    error: Exception | None, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(tmp_path)
    with_wandb(monkeypatch, run)
    ends = pytest.raises(type(error)) if error else nullcontext()
    with ends, open_writers(tmp_path, recipe(tensorboard=False, wandb={"project": "p"})):
        if error:
            raise error
    assert run.exit_codes == [exit_code]


def test_who_has_no_key_for_wandb_is_told_that_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = with_wandb(monkeypatch, FakeRun(tmp_path))
    WandbWriter(tmp_path, "project", "name", {})
    assert not caplog.text
    monkeypatch.setattr("megarl.report.writers.wandb_key_place", lambda: None)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    WandbWriter(tmp_path, "project", "name", {})
    assert [each["mode"] for each in fake.asked] == [None, "offline"]
    assert f"no key here: it writes offline into {tmp_path}/wandb" in caplog.text


def test_a_run_ends_although_wandbs_server_answers_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = FakeRun(tmp_path, answers=False)
    fake = with_wandb(monkeypatch, run)
    WandbWriter(tmp_path, "project", "name", {}).close()
    settings = fake.asked[0]["settings"]
    assert settings.finish_timeout > 0 and settings.finish_timeout_raises
    assert f"wandb sync {tmp_path}/wandb/run-1" in caplog.text


def test_a_run_that_goes_on_by_itself_does_not_need_wandbs_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = with_wandb(monkeypatch, FakeRun(tmp_path), reached=False)
    asked = recipe(tensorboard=False, wandb={"project": "p"})
    with pytest.raises(UserError, match="wandb could not start: Timed out"):
        open_writers(tmp_path, asked)
    open_writers(tmp_path, asked, resumed_step=0, recovered=True).close()
    assert [each["mode"] for each in fake.asked] == [None, None, "offline"]
    assert "writes offline" in caplog.text


@pytest.mark.slow
def test_wandb_writes_offline_without_a_key_and_holds_no_run_up_where_it_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    # An address where nobody answers: a call over the network would fail, or be told by wandb's log.
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    writer = WandbWriter(tmp_path / "run", "project", "name", {"seed": 1})
    writer.write(1, {"reward/mean": 0.5})
    writer.close()
    # Closing tells wandb's service, and does not wait until it has written; a process that ends does.
    wandb.teardown()
    (data,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert b"reward/mean" in data.read_bytes()
    assert not list(tmp_path.glob("run/wandb/run-*"))

    # Of a run it is the run's own folder, which its janitor removes.
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setenv("TMPDIR", short)
        _run_on_without_wandb(tmp_path)
    assert caplog.text.count("the run goes on, and wandb has no more of it") == 1


def wandbs_process() -> int:
    [core] = [pid for pid in process_tree(os.getpid()) if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return core


def _run_on_without_wandb(folder: Path) -> None:
    """wandb's own process is killed, and so removes nothing of what it has in the temporary folder."""
    again = WandbWriter(folder / "run", "project", "name", {})
    os.kill(wandbs_process(), signal.SIGKILL)
    for step in range(100):  # what was on its way is told as sent
        again.write(step, {"reward/mean": 0.5})
        time.sleep(0.02)
    again.close()


@pytest.mark.slow
@pytest.mark.parametrize("done", ["frozen as it is written to", "frozen in the end", "killed in the end"])
def test_a_run_waits_for_wandbs_process_no_longer_than_it_says(
    done: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("megarl.report.writers.ANSWER_S", 1.0)
    monkeypatch.setattr("megarl.report.writers.FINISH_S", 1)
    frozen = done.startswith("frozen")
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setenv("TMPDIR", short)
        writer = WandbWriter(tmp_path / "run", "project", "name", {})
        core = wandbs_process()
        os.kill(core, signal.SIGSTOP if frozen else signal.SIGKILL)
        writes = 20 if done == "frozen as it is written to" else 0
        for step in range(writes):  # more than lies in the socket between the two
            writer.write(step, {f"reward/{name}": 0.5 for name in range(10_000)})
        writer.close()
        assert ended([core], 10)
    assert ("has not answered for" in caplog.text) == frozen
    assert caplog.text.count("the run goes on, and wandb has no more of it") == 1


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("WANDB_MODE", "offlin", "mode: Input should be 'online'"),
        ("WANDB_BASE_URL", "wandb.secret.org", "base_url: Input should be a valid URL"),
    ],
)
def test_what_wandb_is_set_to_is_refused_by_name_and_the_same_command_can_be_given_again(
    variable: str, value: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    wandb.teardown()  # it reads its variables once
    with pytest.raises(UserError, match=told) as refused:
        open_writers(tmp_path, recipe(wandb={"project": "p"}))
    assert "WANDB_..." in str(refused.value) and "secret" not in str(refused.value)
    assert not (tmp_path / METRICS_FILE).exists(), "a run that has begun is not begun again"
