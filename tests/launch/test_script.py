"""The job script: what sbatch reads of it, and what bash does."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.launch.script import SlurmJob, render

JOB = SlurmJob(
    "quick",
    recipe=Path("/shared/my runs/recipe.yaml"),
    command="train",
    log=Path("/shared/my runs/slurm-%j.out"),
    events=Path("/shared/my runs/events.jsonl"),
    metrics=Path("/shared/my runs/metrics.jsonl"),
    nodes=3,
    gpus_per_node=None,
    devices_per_node=2,
    resource="megarl_cpu_device",
)


def asked(script: str) -> set[str]:
    """The #SBATCH options."""
    return {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")}


def command(script: str, folder: Path) -> list[str]:
    """The words of the command that the script becomes, as bash splits them."""
    file = folder / "script"
    file.write_text(script.replace("exec ", "printf '%s\\n' "))
    return subprocess.run(["bash", str(file), "held"], capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_job_on_cpus_asks_for_nodes_and_says_what_a_node_has(tmp_path: Path) -> None:
    script = render(JOB)
    assert asked(script) == {
        "--job-name=quick",
        '--output="/shared/my runs/slurm-%j.out"',
        "--open-mode=append",
        "--nodes=3",
        "--ntasks-per-node=1",
        "--signal=B:USR1@300",
        "--requeue",
    }
    words = command(script, tmp_path)
    driver = words.index("--")
    assert words[1:3] == ["-m", "megarl.launch.leader"]
    assert words[words.index("--resource") + 1] == "megarl_cpu_device=2"
    assert words[words.index("--events") + 1] == "/shared/my runs/events.jsonl"
    assert words[words.index("--metrics") + 1] == "/shared/my runs/metrics.jsonl"
    assert words[driver + 2 :] == ["-m", "megarl", "train", "/shared/my runs/recipe.yaml", "--continue"]


def test_a_request_to_stop_that_comes_while_the_job_is_set_up_waits_for_the_leader(tmp_path: Path) -> None:
    """As one does that comes while Python loads; without it the script would end there, and the job be queued no more."""
    listens = "import signal as s; s.signal(s.SIGUSR1, lambda *_: print('heard')); s.pthread_sigmask(s.SIG_UNBLOCK, {s.SIGUSR1})"
    script = render(replace(JOB, setup="kill -USR1 $$; echo set up"))
    file = tmp_path / "script"
    file.write_text(script.replace("-m megarl.launch.leader", f'-c "{listens}"'))
    done = subprocess.run(["bash", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split("\n")) == (0, ["set up", "heard", ""])


def test_a_job_with_spares_outlives_a_node() -> None:
    assert asked(render(replace(JOB, spares=1))) - asked(render(JOB)) == {"--no-kill"}


def test_a_job_on_gpus_asks_slurm_for_them_and_everything_else_as_given(tmp_path: Path) -> None:
    job = replace(
        JOB,
        gpus_per_node=8,
        time="1-12:00:00",
        partition="big",
        account="lab",
        cpus_per_task=96,
        memory="0",
        exclude="n[1-2]",
        setup="true && true",
        extra=("--qos=high", "--switches=1"),
    )
    script = render(job)
    assert {
        *(
            "--gpus-per-node=8",
            "--time=1-12:00:00",
            "--partition=big",
            "--account=lab",
            "--cpus-per-task=96",
            "--mem=0",
        ),
        *("--exclude=n[1-2]", "--qos=high", "--switches=1"),
    } <= asked(script)
    assert "\ntrue && true\n" in script
    assert "--resource" not in command(script, tmp_path)


def test_a_partition_with_a_space_is_one_word_to_sbatch() -> None:
    lines = asked(
        render(replace(JOB, partition="big mem", account="our lab", exclude="n1 n2", memory="1 G", time="1 day"))
    )
    words = {word for line in lines for word in shlex.split(line)}
    assert {"--partition=big mem", "--account=our lab", "--exclude=n1 n2", "--mem=1 G", "--time=1 day"} <= words


def test_a_job_on_gpus_takes_whole_nodes_where_nothing_else_is_said() -> None:
    """Without a word SLURM may give it one CPU a node."""
    whole = {"--exclusive", "--mem=0"}
    gpus = replace(JOB, gpus_per_node=8)
    assert asked(render(gpus)) == asked(render(JOB)) | whole | {"--gpus-per-node=8"}
    assert whole <= asked(render(replace(gpus, extra=("--qos=high", "--dependency=afterok:9", "-Cfast"))))
    assert not whole & asked(render(replace(gpus, extra=("--qos=high --cpus-per-gpu=12",))))
    assert "--gpus=8" in asked(render(replace(gpus, extra=("--gpus=8", "--comment='a --array'", '-J"x'))))
    assert not whole & asked(render(replace(gpus, cpus_per_task=96)))
    assert not whole & asked(render(replace(gpus, memory="800G")))


@pytest.mark.parametrize(
    "option",
    ["--exclusive=user", "--oversubscribe", "-s", "-c96", "--cpus-per-gpu=12", "--mem=800G", "--mem-per-gpu=100G"],
)
def test_what_is_said_of_a_nodes_parts_stands_alone(option: str) -> None:
    """SLURM refuses --mem beside --mem-per-gpu."""
    job = replace(JOB, gpus_per_node=8)
    assert asked(render(replace(job, extra=(option,)))) == asked(render(JOB)) | {"--gpus-per-node=8", option}


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--array=1-3", "every job of an array would be the same run"),
        ("-a1-3", "every job of an array would be the same run"),
        ("--output=mine.out", "megarl logs reads the log"),
        ("--nodes=4", "checked against --nodes"),
        ("-n 8", "each node has one task"),
        ("--no-requeue", "goes on in the same job"),
        ("--signal=B:TERM@9", "is --grace"),
        ("--time=5", "give it as --time"),
        ("--qos=high --array=1-3", "every job of an array"),
        ("--outp=x", "megarl logs reads"),
    ],
)
def test_what_the_job_is_made_for_cannot_be_undone(option: str, says: str) -> None:
    """sbatch takes the last word of several: what stood before the script's own would be read by nothing."""
    with pytest.raises(UserError, match=re.escape(f"--sbatch {option} cannot be: ") + f".*{says}"):
        render(replace(JOB, extra=("--qos=high", option)))


def test_a_log_in_any_folder_is_read_as_it_is_by_sbatch() -> None:
    script = render(replace(JOB, log=Path('/shared/my "new" runs\\of 50%%/slurm-%j.out')))
    # As sbatch splits it: quotes hold blanks together, a backslash takes what is behind it as it is.
    assert r'--output="/shared/my \"new\" runs\\of 50%%/slurm-%j.out"' in asked(script)


def test_sbatch_reads_all_options_because_nothing_else_stands_before_them() -> None:
    lines = render(replace(JOB, time="10", setup="module load cuda")).splitlines()
    last = max(index for index, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[: last + 1])


@pytest.mark.parametrize(
    ("text", "says"), [(None, "no job script at"), ("{{ job.colour }}", "colour"), ("{% if %}", "cannot be filled in")]
)
def test_a_template_that_cannot_be_used_is_refused(tmp_path: Path, text: str | None, says: str) -> None:
    template = tmp_path / "template"
    if text is not None:
        template.write_text(text)
    with pytest.raises(UserError, match=says):
        render(JOB, template)
