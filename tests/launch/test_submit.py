"""What is refused before anything is submitted, and what would be submitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.launch.ray_jobs import TokenError
from megarl.launch.record import Submission, find_submission
from megarl.launch.submit import SlurmOptions, submit_ray, submit_slurm
from megarl.run.ending import SUBMITTED_BY
from megarl.run.lock import locked
from megarl.run.preflight import preflight
from tests.support.bad_input import Place, good_place
from tests.support.tiny import write_tiny_model

ON_CPUS = SlurmOptions()
GPUS = ("cluster.platform=auto", "model.dtype=bfloat16", "cluster.devices=14", "rollout.tp=2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("submit") / "model")


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Place:
    return good_place(tmp_path, model)


@pytest.fixture
def dry_run(place: Place) -> Callable[..., str]:
    """What `megarl submit --slurm --dry-run` prints."""

    def run(options: SlurmOptions = ON_CPUS, *overrides: str) -> str:
        said: list[str] = []
        submit_slurm(place.recipe, overrides, options, resume=False, dry_run=True, say=said.append)
        assert not place.run.exists()
        return "".join(said)

    return run


def test_devices_on_cpus_are_spread_over_the_nodes(dry_run: Callable[..., str], place: Place) -> None:
    script = dry_run(SlurmOptions(nodes=3), "cluster.devices=4")
    assert "--nodes=3" in script and "--resource megarl_cpu_device=2" in script
    assert f"megarl train {place.run}/launch/recipe.yaml --continue" in script


def test_a_percent_of_a_folder_is_no_pattern_of_the_logs_name(dry_run: Callable[..., str], place: Place) -> None:
    script = dry_run(SlurmOptions(), f"run.dir={place.root}/50%j")
    assert f'--output="{place.root}/50%%j/' in script and "/launch/slurm-%j.out" in script


def test_spares_are_counted_among_the_nodes(dry_run: Callable[..., str]) -> None:
    script = dry_run(SlurmOptions(nodes=3), "cluster.devices=4", "cluster.spares=1")
    assert "--nodes=3" in script and "--resource megarl_cpu_device=2" in script and "#SBATCH --no-kill" in script
    with pytest.raises(UserError, match=r"cluster\.spares is 3, and --nodes 3 counts them: give at least 4 nodes"):
        dry_run(SlurmOptions(nodes=3), "cluster.devices=4", "cluster.spares=3")
    dry_run(SlurmOptions(nodes=3, gpus_per_node=8), *GPUS, "cluster.spares=1")
    with pytest.raises(UserError, match=r"--nodes 2 without cluster\.spares 1 x --gpus-per-node 8 are 8 GPUs"):
        dry_run(SlurmOptions(nodes=2, gpus_per_node=8), *GPUS, "cluster.spares=1")


def test_gpus_of_the_nodes_are_those_of_the_recipe(dry_run: Callable[..., str]) -> None:
    """14 for the ranks, 2 for the server: two nodes of eight."""
    options = SlurmOptions(nodes=2, gpus_per_node=8)
    assert "--gpus-per-node=8" in dry_run(options, *GPUS)
    with pytest.raises(
        UserError,
        match=r"--nodes 3 x --gpus-per-node 8 are 24 GPUs.*uses 16 \(cluster\.devices 14 \+ rollout\.servers 1",
    ):
        dry_run(replace(options, nodes=3), *GPUS)
    with pytest.raises(UserError, match=r"cluster\.platform is cpu, and the job would run on cuda"):
        dry_run(options)


COLOCATED = ("cluster.platform=auto", "model.dtype=bfloat16", "cluster.devices=8", "rollout.servers=8")
OFFLOAD = "rollout.offload=[weights,kv_cache]"


@pytest.mark.parametrize("offload", [(OFFLOAD,), ()], ids=["taking turns", "side by side"])
def test_the_number_of_gpus_says_whether_servers_stand_on_the_ranks(
    dry_run: Callable[..., str], offload: tuple[str, ...]
) -> None:
    """As it does when the run gives out its devices: their own where there are enough."""
    for nodes, where in (
        (1, "the servers (rollout.servers 8 x rollout.tp 1) on the ranks' 8 GPUs"),
        (2, "on 8 GPUs of their own"),
    ):
        script = dry_run(SlurmOptions(nodes=nodes, gpus_per_node=8), *COLOCATED, *offload)
        [last] = script.splitlines()[-1:]
        assert last.startswith("# ") and where in last
    with pytest.raises(
        UserError, match=r"are 24 GPUs, and the recipe uses 16 .*, or 8 with the servers on the ranks' GPUs"
    ):
        dry_run(SlurmOptions(nodes=3, gpus_per_node=8), *COLOCATED, *offload)


def test_where_the_servers_will_be_is_said_with_the_job(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/bash\necho 8\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    said: list[str] = []
    options = SlurmOptions(gpus_per_node=8)
    again = "cd here && megarl submit mine"
    words = [*COLOCATED, OFFLOAD]
    submit_slurm(place.recipe, words, options, resume=False, dry_run=False, say=said.append, again=again)
    assert (place.run / "launch" / SUBMITTED_BY).read_text() == f"{again}\n"
    assert (
        said[-1].startswith("SLURM job 8: ") and "on the ranks' 8 GPUs; 16 GPUs would give them their own" in said[-1]
    )


@pytest.mark.parametrize("extra", ["", "--clusters=b", "-Mb"])
def test_a_partition_of_another_cluster_is_left_to_sbatch(
    extra: str, place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, line in (("sbatch", "8;b"), ("sinfo", "small")):
        (tmp_path / name).write_text(f"#!/bin/bash\necho '{line}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    if not extra:
        monkeypatch.setenv("SBATCH_CLUSTERS", "b")
    options = SlurmOptions(partition="large", extra=(extra,) if extra else ())
    submit_slurm(place.recipe, [], options, resume=False, dry_run=False, say=lambda _: None)
    log = str(place.run / "launch" / "slurm-8.out")
    assert find_submission(place.run) == Submission("slurm", "8", address="b", log=log)
    monkeypatch.delenv("SBATCH_CLUSTERS", raising=False)
    with pytest.raises(UserError, match="--partition large: SLURM has no such partition"):
        submit_slurm(place.recipe, [], replace(options, extra=()), resume=False, dry_run=False, say=lambda _: None)


@pytest.mark.parametrize(
    ("overrides", "nodes", "gpus", "why"),
    [
        (("rollout.max_staleness=1",), 1, 8, r"rollout\.max_staleness is 1"),
        (("cluster.devices=2", "rollout.servers=1", "rollout.tp=4"), 1, 2, r"rollout\.tp is 4, more than there are"),
        (
            ("cluster.devices=6", "rollout.servers=1", "rollout.tp=4"),
            2,
            3,
            r"tp 4 would have uneven parts on nodes of 3",
        ),
    ],
)
def test_servers_that_cannot_stand_on_the_ranks_need_gpus_of_their_own(
    dry_run: Callable[..., str], overrides: tuple[str, ...], nodes: int, gpus: int, why: str
) -> None:
    options = SlurmOptions(nodes=nodes, gpus_per_node=gpus)
    with pytest.raises(
        UserError, match=rf"as many as the ranks alone .*servers cannot be on these: .*{why}.*it takes \d+"
    ):
        dry_run(options, *COLOCATED, *overrides)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (SlurmOptions(time="4h"), "--time 4h is not a time limit"),
        (SlurmOptions(time="5", grace_s=300), r"--time 5 leaves nothing of the --grace of 300 s"),
        (
            SlurmOptions(time="3-0", grace_s=65536),
            "--grace 65536 is more than SLURM takes: .* at most 65535 s before it",
        ),
        (SlurmOptions(grace_s=90000), "--grace 90000 is more than SLURM takes"),
        (SlurmOptions(temp=Path("scratch")), "--temp scratch: wanted is an absolute path"),
        (SlurmOptions(temp=Path("/local/scratch/of/somebody")), r"of at most 2\d characters"),
        (SlurmOptions(template=Path("nowhere")), "no job script at nowhere"),
    ],
)
def test_options_that_cannot_be_are_refused(dry_run: Callable[..., str], options: SlurmOptions, says: str) -> None:
    with pytest.raises(UserError, match=says):
        dry_run(options)


def test_a_job_may_have_no_time_limit(dry_run: Callable[..., str]) -> None:
    """sbatch takes 0 for that, and without a word the partition's own limit."""
    assert "#SBATCH --time=0\n" in dry_run(replace(ON_CPUS, time="0"))


def test_a_recipe_that_cannot_run_is_refused_here(dry_run: Callable[..., str], place: Place) -> None:
    with pytest.raises(UserError, match=r"train\.stepz"):
        dry_run(SlurmOptions(), "train.stepz=1")
    place.data.unlink()
    with pytest.raises(UserError, match="no such data file"):
        dry_run()


def test_a_machine_without_slurm_is_told_so_and_nothing_is_written(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no sbatch on this machine"):
        submit_slurm(place.recipe, (), SlurmOptions(), resume=False, dry_run=False, say=print)
    assert not place.run.exists()


def test_a_run_whose_job_has_not_ended_is_not_submitted_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in (("sbatch", "8"), ("scontrol", "JobState=PENDING Reason=Resources ExitCode=0:0")):
        (tmp_path / name).write_text(f"#!/bin/bash\necho '{text}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    Submission("slurm", "7").write(place.run)
    with pytest.raises(UserError, match=r"slurm job 7 of .* has not ended.*megarl cancel"):
        submit_slurm(place.recipe, (), SlurmOptions(), resume=False, dry_run=False, say=print)


def test_a_run_that_is_submitted_twice_at_once_has_one_job(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each looked for the other's job before either had one, and `megarl cancel` ended the second alone."""
    for name, text in (("sbatch", "echo 8; touch submitted"), ("scontrol", "echo JobState=PENDING ExitCode=0:0")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)

    def other_was_faster(*asked: Any, **more: Any) -> Any:
        Submission("slurm", "7").write(place.run)
        return preflight(*asked, **more)

    monkeypatch.setattr("megarl.launch.submit.preflight", other_was_faster)
    with pytest.raises(UserError, match=r"slurm job 7 of .* has not ended"):
        submit_slurm(place.recipe, (), SlurmOptions(), resume=False, dry_run=False, say=print)
    (place.run / "launch" / "submission.json").unlink()
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    with locked(place.run / "launch"), pytest.raises(UserError, match=r"launch is in use: process \d+ on "):
        submit_slurm(place.recipe, (), SlurmOptions(), resume=False, dry_run=False, say=print)
    assert not (tmp_path / "submitted").exists()
    submit_slurm(place.recipe, (), SlurmOptions(), resume=False, dry_run=False, say=print)
    assert (tmp_path / "submitted").exists() and find_submission(place.run).job == "8"


def test_a_runs_folder_that_takes_no_job_is_named(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/bash\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    place.run.mkdir(parents=True)
    (place.run / "launch").touch()
    with pytest.raises(UserError, match=r"r cannot be written to: .*/launch: File exists\. Mend what is there"):
        submit_slurm(place.recipe, (), SlurmOptions(), resume=False, dry_run=False, say=print)


def test_a_run_whose_cluster_wants_its_token_is_not_submitted_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whether its job has ended; what a cluster of another is at that address by now is told, too."""

    def wants_token(submission: Submission) -> bool:
        raise TokenError(submission.address)

    monkeypatch.setattr("megarl.launch.submit.is_alive", wants_token)
    Submission("ray", "job_1", address="http://head:8265").write(place.run)
    with pytest.raises(
        UserError, match=r"cannot be asked\. The Ray cluster at http://head:8265 wants.*submission\.json"
    ):
        submit_ray(place.recipe, [], "http://head:8265", place.root, resume=True, dry_run=False, say=print)


def test_a_ray_job_needs_paths_that_the_cluster_sees(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def dry_run(*overrides: str, working_dir: Path = place.root) -> None:
        submit_ray(place.recipe, overrides, "http://h:8265", working_dir, resume=False, dry_run=True, say=said.append)

    dry_run("run.seed=7")
    assert said == ["exec python -m megarl train recipe.yaml run.seed=7 --continue"]
    monkeypatch.chdir(place.root)
    with pytest.raises(UserError, match=r"run\.dir is runs, relative"):
        dry_run("run.dir=runs")
    with pytest.raises(UserError, match=r"model\.path is model, relative"):
        dry_run("model.path=model")
    with pytest.raises(UserError, match="not in the folder that is sent"):
        dry_run(working_dir=place.model)


def test_a_ray_cluster_that_does_not_answer_is_named(place: Place) -> None:
    with pytest.raises(UserError, match=r"The Ray cluster at http://127\.0\.0\.1:9 does not take jobs from here"):
        submit_ray(place.recipe, (), "http://127.0.0.1:9", place.root, resume=False, dry_run=False, say=print)
    assert not place.run.exists()
