"""Runs on a real SLURM: three compute nodes, each with its own network, processes and memory, and a login node."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.launch.script import SlurmJob, render
from tests.end_to_end.harness import RECIPE
from tests.support.netns_cluster import Node
from tests.support.slurm_cluster import GPUS, SlurmCluster, slurm_cluster

pytestmark = [pytest.mark.slow, pytest.mark.slurm]

JOB_S = 240.0
OURS = ("-m megarl", "raylet", "gcs_server", "ray::", "ray_start", "sglang")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), 3) as cluster:
        yield cluster


def field(slurm: SlurmCluster, job: str, name: str) -> str:
    """What SLURM says of a job."""
    fields = slurm.ask("scontrol", "show", "job", job, "--oneliner").split()
    return next(each.partition("=")[2] for each in fields if each.startswith(f"{name}="))


def wait_for(slurm: SlurmCluster, job: str, *states: str, within_s: float = JOB_S) -> None:
    slurm.wait(lambda: field(slurm, job, "JobState") in states, within_s)


def job_of(run: Path) -> str:
    return str(json.loads((run / "launch" / "submission.json").read_text())["job"])


def log_of(run: Path) -> str:
    return (run / "launch" / f"slurm-{job_of(run)}.out").read_text()


def steps(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def processes(node: Node) -> str:
    """Command lines on a node."""
    return node.run(["ps", "-eo", "args"]).stdout


def assert_nothing_left(slurm: SlurmCluster, *nodes: Node) -> None:
    def left() -> list[str]:
        found = []
        for node in nodes:
            found += [line for line in processes(node).splitlines() if any(each in line for each in OURS)]
            found += node.run(["find", str(slurm.disk), "/dev/shm", "-mindepth", "1"]).stdout.split()
        return found

    try:
        slurm.wait(lambda: not left(), 15.0)
    except AssertionError:
        assert left() == []


def submit_driver(slurm: SlurmCluster, folder: Path, nodes: int = 1, start_s: int = 60, *options: str) -> str:
    """A job with a small driver in place of a run; returns its id."""
    folder.mkdir()
    job = SlurmJob(
        folder.name,
        recipe=Path("recipe"),
        command="train",
        log=folder / "out",
        events=folder / "events.jsonl",
        metrics=folder / "metrics.jsonl",
        nodes=nodes,
        gpus_per_node=None,
        devices_per_node=1,
        resource="megarl_cpu_device",
        temp=slurm.disk,
        start_s=start_s,
        extra=options,
    )
    run = "-m megarl train recipe --continue"
    script = render(job)
    assert run in script
    driver = Path(__file__).with_name("slurm_driver.py")
    (folder / "script").write_text(script.replace(run, f"{driver} {folder}"))
    return slurm.ask("sbatch", "--parsable", str(folder / "script")).strip()


def test_two_jobs_on_a_node_do_not_meet_and_their_exit_codes_are_the_drivers(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    node = slurm.compute[0]
    first, second = tmp_path / "first", tmp_path / "second"
    here = f"--nodelist={node.name}"
    jobs = [submit_driver(slurm, folder, 1, 60, here) for folder in (first, second)]
    slurm.wait(lambda: all((folder / "seen-0.json").exists() for folder in (first, second)), JOB_S)
    seen = [json.loads((folder / "seen-0.json").read_text()) for folder in (first, second)]
    for key in ("session", "token"):
        assert seen[0][key] != seen[1][key]
    assert [len(each["nodes"]) for each in seen] == [1, 1]
    # Before a time limit, SLURM sends the signal that is sent here: one stops as a run does, the other fails.
    (second / "code").write_text("7")
    for job in jobs:
        slurm.ask("scancel", "--batch", "--signal=USR1", job)
    wait_for(slurm, jobs[1], "FAILED")
    wait_for(slurm, jobs[0], "COMPLETED")
    assert (first / "seen-1.json").exists()
    assert [field(slurm, job, "Restarts") for job in jobs] == ["1", "0"]
    assert [field(slurm, job, "ExitCode") for job in jobs] == ["0:0", "7:0"]
    events = [json.loads(line) for line in (first / "events.jsonl").read_text().splitlines()]
    start = ["started", "nodes ready", "driver ended", "nodes ended"]
    assert [(each["restart"], each["event"]) for each in events] == [
        *((0, name) for name in (*start, "requeued")),
        *((1, name) for name in start),
    ]
    assert_nothing_left(slurm, node)


def test_slurm_gives_a_job_on_gpus_all_of_its_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Where nothing is said of CPUs and memory: SLURM itself would give it one CPU a node."""
    job = SlurmJob(
        "gpus",
        recipe=Path("recipe"),
        command="train",
        log=tmp_path / "out",
        events=tmp_path / "events.jsonl",
        metrics=tmp_path / "metrics.jsonl",
        nodes=2,
        gpus_per_node=GPUS,
        devices_per_node=GPUS,
        resource="GPU",
    )
    for each, processors in (
        (job, 16),
        (replace(job, cpus_per_task=3), 6),
        (replace(job, extra=("--oversubscribe",)), 2),
    ):
        (tmp_path / "script").write_text(render(each))
        done = slurm.run("sbatch", "--test-only", str(tmp_path / "script"))
        assert done.returncode == 0 and f"using {processors} processors" in done.stderr, done.stderr


def test_a_node_that_does_not_come_is_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    slurm.nodes.cut_between(1, 2)
    try:
        job = submit_driver(slurm, tmp_path / "cut", 2, 6, "--nodelist=node2,node3")
        wait_for(slurm, job, "FAILED")
    finally:
        slurm.nodes.mend_between(1, 2)
    out = (tmp_path / "cut" / "out").read_text()
    assert field(slurm, job, "ExitCode") == "1:0"
    assert "node3 (nothing was heard of it)" in out and "node2 (nothing" not in out
    assert_nothing_left(slurm, *slurm.compute)


def test_a_run_over_three_nodes_goes_on_after_one_lost_its_power_and_cancelled_leaves_nothing(
    slurm: SlurmCluster, inputs: Path
) -> None:
    recipe = inputs / "slurm.yaml"
    recipe.write_text(RECIPE.format(folder=inputs))
    run = inputs / "runs" / "slurm"
    overrides = ("run.name=slurm", "cluster.devices=2", "train.steps=1000", "train.save_every=1", "data.eval=null")
    words = ("submit", str(recipe), *overrides, "--slurm", "--nodes=3", f"--temp={slurm.disk}")
    following = slurm.popen([sys.executable, "-m", "megarl", *words, "--follow"])
    try:
        slurm.wait(lambda: 2 in steps(run), JOB_S)
        found = {node.name: processes(node) for node in slurm.compute}
        ranks = [name for name, lines in found.items() if "ray::RankActor" in lines]
        servers = [name for name, lines in found.items() if "sglang_cpu" in lines]
        assert len(ranks) == 2 and len(servers) == 1 and not set(ranks) & set(servers), found
        assert "RUNNING" in slurm.megarl("status", str(run)).stdout
        lost = slurm.node(ranks[1])
        lost.power_off()
        slurm.wait(lambda: "SLURM queues the job again" in log_of(run), JOB_S)
        again = slurm.megarl(*words, "--resume")
        assert again.returncode == 2 and "has not ended" in again.stderr
        before = steps(run)[-1]
        slurm.restart(lost)
        slurm.wait(lambda: steps(run)[-1] > before, JOB_S)
        assert slurm.megarl("cancel", str(run)).returncode == 0
        out, err = following.communicate(timeout=JOB_S)
    finally:
        following.kill()
    # By SIGTERM, or by the SIGKILL that SLURM sends after it where the job is not quick.
    assert following.returncode in (137, 143), (out, err, log_of(run))
    assert f"lost {lost.name}" in out
    assert steps(run) == list(range(len(steps(run))))
    assert field(slurm, job_of(run), "JobState") == "CANCELLED" and field(slurm, job_of(run), "Restarts") == "1"
    assert_nothing_left(slurm, *slurm.compute)
