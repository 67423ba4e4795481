"""SLURM's words, without a SLURM: small programs on the path answer as its commands do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megarl.core.errors import MegarlError, UserError
from megarl.launch import slurm, watch
from megarl.launch.record import Submission
from tests.support.processes import heed_interrupts

JOB = (
    "JobId=7 JobName=x UserId=u(1) Requeue=1 Restarts=2 BatchFlag=1 ExitCode={code} JobState={state} Reason={reason} "
    "NodeList=n[1-2] Command=/a b.sh"
)


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for programs, the only one on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}")
    return folder


def program(folder: Path, name: str, out: str = "", err: str = "", code: int = 0) -> None:
    file = folder / name
    file.write_text(f"#!/bin/bash\nprintf '%s\\n' '{out}'\nprintf '%s\\n' '{err}' >&2\nexit {code}\n")
    file.chmod(0o755)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("10:30", 630),
        ("4:00:00", 14400),
        ("1-12", 129600),
        ("2-0:30", 174600),
        ("1-2:03:04", 93784),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert slurm.seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "4h", "1:2:3:4", "-5", "1-", "1:60", "two", "1 2"])
def test_what_is_no_time_limit_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="DAYS-HOURS"):
        slurm.seconds_of(text)


def test_a_machine_without_sbatch_is_told_from_one_with(answers: Path) -> None:
    with pytest.raises(UserError, match=r"no sbatch.*--dry-run"):
        slurm.require()
    program(answers, "sbatch")
    slurm.require()


def test_an_unknown_partition_is_refused_with_those_that_there_are(answers: Path) -> None:
    program(answers, "sinfo", "long\nshort\nlong")
    slurm.check_partition("short")
    slurm.check_partition("short,long")  # whichever has room first
    with pytest.raises(UserError, match=r"--partition lng: SLURM has no such partition\. Did you mean long\?"):
        slurm.check_partition("short,lng")
    with pytest.raises(UserError, match=r"--partition shrt.*Did you mean short\? It has: long, short\."):
        slurm.check_partition("shrt")


def test_a_job_is_not_asked_for_where_there_is_no_slurm(answers: Path) -> None:
    with pytest.raises(UserError, match="There is no scontrol on this machine"):
        slurm.state_of("7")


def test_commands_without_a_cluster_are_told_so(answers: Path) -> None:
    program(answers, "sinfo", err="sinfo: fatal: Could not establish a configuration source", code=1)
    with pytest.raises(UserError, match=r"SLURM does not answer here: sinfo: fatal.*login node"):
        slurm.check_partition("main")


def test_a_job_number_is_taken_from_what_sbatch_says(answers: Path, tmp_path: Path) -> None:
    program(answers, "sbatch", "4711;cluster")
    (tmp_path / "s").touch()
    assert slurm.submit(tmp_path / "s") == ("4711", "cluster")
    program(answers, "sbatch", err="sbatch: error: Invalid account", code=1)
    with pytest.raises(UserError, match="SLURM refuses the job: sbatch: error: Invalid account"):
        slurm.submit(tmp_path / "s")


def test_a_job_on_another_cluster_is_asked_for_there(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With SBATCH_CLUSTERS the cluster that is here knows no such job: it was said to have ended while it ran."""
    there = JOB.format(state="RUNNING", code="0:0", reason="None")
    answer = f"[[ $1 == --clusters=b ]] && echo '{there}' && exit; echo Invalid job id >&2; exit 1"
    for name, line in (("scontrol", answer), ("scancel", f"echo $@ > {tmp_path}/ended"), ("sbatch", "echo '7;b'")):
        (answers / name).write_text(f"#!/bin/bash\n{line}\n")
        (answers / name).chmod(0o755)
    monkeypatch.setenv("SBATCH_CLUSTERS", "b,c")
    (tmp_path / "s").touch()
    job, cluster = slurm.submit(tmp_path / "s")
    assert slurm.state_of(job) is None
    run = tmp_path / "run"
    Submission("slurm", job, address=cluster).write(run)
    assert watch.status(run) == ("slurm 7", "RUNNING on n[1-2], queued again 2 times", "-")
    watch.cancel(run)
    assert (tmp_path / "ended").read_text() == "--clusters=b 7\n"


def test_what_a_script_says_holds_whatever_the_environment_has(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch takes variables before a script's options; those of the job that it is called in make srun refuse the new one."""
    (answers / "sbatch").write_text("#!/bin/bash\necho 7; echo ${!SBATCH_*} ${!SLURM_*} > ${2%script}seen\n")
    (answers / "sbatch").chmod(0o755)
    script = tmp_path / "script"
    script.write_text(
        "#!/bin/bash\n#SBATCH --time=60\n#SBATCH --mem=0 --requeue\n#SBATCH --output=out\n# --qos --chdir\n"
    )
    for name in (
        *("SBATCH_TIMELIMIT", "SBATCH_NO_REQUEUE", "SBATCH_ERROR", "SBATCH_OUTPUT", "SBATCH_MEM_PER_CPU", "SBATCH_QOS"),
        *("SBATCH_ARRAY_INX", "SBATCH_WAIT", "SLURM_CONF", "SLURM_MEM_PER_CPU"),
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert slurm.submit(script) == ("7", "")
    assert (tmp_path / "seen").read_text().split() == ["SBATCH_QOS", "SLURM_CONF", "SLURM_MEM_PER_CPU"]
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    slurm.submit(script)
    assert (tmp_path / "seen").read_text().split() == ["SBATCH_QOS", "SLURM_CONF"]


def test_what_a_script_says_by_a_letter_holds_as_well(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of --sbatch=-pshort went to the partition that SBATCH_PARTITION named."""
    (answers / "sbatch").write_text("#!/bin/bash\necho 7; echo ${!SBATCH_*} > ${2%script}seen\n")
    (answers / "sbatch").chmod(0o755)
    script = tmp_path / "script"
    script.write_text("#!/bin/bash\n#SBATCH -pshort -q high\n#SBATCH -A us\n#SBATCH --mem-per-gpu=80G\n# -C x\n")
    for name in ("PARTITION", "QOS", "ACCOUNT", "MEM_PER_NODE", "CONSTRAINT"):
        monkeypatch.setenv(f"SBATCH_{name}", "1")
    slurm.submit(script)
    assert (tmp_path / "seen").read_text().split() == ["SBATCH_CONSTRAINT"]


@pytest.mark.parametrize(
    ("state", "code", "alive", "exit_code"),
    [
        ("RUNNING", "0:0", True, 0),
        ("PENDING", "0:0", True, 0),
        ("SIGNALING", "0:0", True, 0),
        ("STOPPED", "0:0", True, 0),
        ("SPECIAL_EXIT", "0:0", True, 0),
        ("COMPLETED", "0:0", False, 0),
        ("FAILED", "7:0", False, 7),
        ("CANCELLED", "0:15", False, 143),
        ("OUT_OF_MEMORY", "0:125", False, 253),
    ],
)
def test_a_jobs_state_is_understood(answers: Path, state: str, code: str, alive: bool, exit_code: int) -> None:
    program(answers, "scontrol", JOB.format(state=state, code=code, reason="None"))
    found = slurm.state_of("7")
    assert found is not None and (found.alive, found.exit_code) == (alive, exit_code)
    assert found.describe() == f"{state} on n[1-2], queued again 2 times"


def test_a_jobs_state_is_understood_whatever_else_is_said_of_it(answers: Path) -> None:
    """Comments and paths are anybody's bytes."""
    program(answers, "scontrol", JOB.format(state="RUNNING", code="0:0", reason="None"))
    file = answers / "scontrol"
    file.write_bytes(file.read_bytes().replace(b"Command=", b"Comment=gr\xfcezi Command="))
    found = slurm.state_of("7")
    assert found is not None and found.alive


def test_a_job_that_slurm_has_forgotten_is_not_a_slurm_that_is_silent(answers: Path) -> None:
    program(answers, "scontrol", err="slurm_load_jobs error: Invalid job id specified", code=1)
    assert slurm.state_of("7") is None
    program(answers, "scontrol", err="Unable to contact slurm controller", code=1)
    with pytest.raises(MegarlError, match="SLURM does not answer: Unable to contact"):
        slurm.state_of("7")


def test_a_slurm_that_is_silent_is_told_and_not_waited_for(answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "COMMAND_S", 0.05)
    for name in ("scontrol", "sbatch"):
        (answers / name).write_text("#!/bin/bash\nexec /bin/sleep 9\n")
        (answers / name).chmod(0o755)
    (answers / "script").touch()
    with pytest.raises(
        MegarlError, match=r"SLURM does not answer: `scontrol show job 7 --oneliner` had not ended after 0\.05 s"
    ):
        slurm.state_of("7")
    with pytest.raises(MegarlError, match="It may have taken effect all the same: see squeue"):
        slurm.submit(answers / "script")


def test_an_answer_without_a_state_is_shown(answers: Path) -> None:
    program(answers, "scontrol", "No jobs in the system")
    with pytest.raises(MegarlError, match="SLURM says no state of job 7: 'No jobs in the system'"):
        slurm.state_of("7")


SUBMITTING = """
import sys
from pathlib import Path
from megarl.core.interrupts import Interrupts, as_error
from megarl.launch.slurm import submit
with Interrupts():
    try:
        submit(Path(sys.argv[1]))
    except KeyboardInterrupt as error:
        print(as_error(error).told())
"""


def test_who_interrupts_sbatch_is_told_that_the_job_may_be_queued(answers: Path, tmp_path: Path) -> None:
    (answers / "sbatch").write_text("#!/bin/bash\nkill -INT $PPID\nread -t 5 -u 1\n")  # nothing is read there
    (answers / "sbatch").chmod(0o755)
    (tmp_path / "script").write_text("#!/bin/bash\n")
    done = subprocess.run(
        [sys.executable, "-c", SUBMITTING, str(tmp_path / "script")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        preexec_fn=heed_interrupts,
    )
    assert "interrupted by Ctrl-C" in done.stdout and "the job may be queued all the same" in done.stdout, done
