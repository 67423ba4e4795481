"""What of megarl works on this machine's GPUs: the packages that are there, the engine's tests, one run end to end.

    python -m tools.gpu_check [--minutes 60] [--out bench/results] [--go-on]   # or: make gpu-check

The most telling first, in the time that is given. Each package is imported, and each check made, in a process of its own: a
package that is installed and does not load is as good as absent, and an error of CUDA ends whatever a process does on the device.
What the machine lacks takes its own tests away, and the table says which. In the folder of --out, as they come:
`gpu_check.jsonl`, a line a row; `gpu_check_tests.jsonl`, a line a test, with its seconds; `gpu_check.log`. With --go-on they are
kept, and what they say was not tried is tried; a row's last line counts. With --platform cpu the same checks run without a GPU.
Exit codes: 0 what could be tried works, 1 something does not work or was not tried in time, or nothing could be tried, 2 there is
no GPU here.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megarl.core import janitor
from megarl.core.json_file import whole_lines
from megarl.core.platform import cuda_device_count

ROOT = Path(__file__).parents[1]
IMPORT_S = 300.0
TEST_S, STARTING_S = 90.0, 300.0  # a test's; of one that may start several processes or servers
NOTHING_LEFT = 5  # pytest's exit code where no test was selected
TRIED = ("passed", "failed", "begun")
STARTED = "MEGARL_GPU_CHECK_STARTED"  # marks all processes that a check has started
OF = "MEGARL_GPU_CHECK"  # the check that a process's tests are of, for the lines of tests/support/results.py
WIDTH = 100
# Those that the tests need; whatever else a machine's pytest would load could only spoil the check.
PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin")
LATE, NOT_TRIED = "no time was left", "not tried"
ONE_RUN = "one run on one GPU"
HANGING_S = 10.0  # beyond a test's seconds, after which its process is ended from outside Python
LAST_S = 120.0  # for what has begun when the time is over

TORCH = """
import torch
assert torch.cuda.is_available(), "torch sees no device"
print(torch.__version__, torch.cuda.get_device_name(), f"{torch.cuda.device_count()} devices")
"""
# Of itself it imports nothing before a name of it is asked for.
TRANSFORMERS = "import transformers; from transformers import AutoModelForCausalLM; print(transformers.__version__)"
PARTS = {
    "torch.cuda": (TORCH, "nothing runs on GPUs"),
    "transformers": (TRANSFORMERS, "nothing to compare with"),
    "Megatron-core": ("import megatron.core; print(megatron.core.__version__)", "no engine"),
    "Transformer Engine": (
        "import transformer_engine as te, transformer_engine.pytorch; print(te.__version__)",
        "layers of torch's own: slower, no FP8",
    ),
    "SGLang's kernels": ("import sgl_kernel; print(sgl_kernel.__version__)", "no server starts on GPUs: no rollout"),
    "Ray": ("import ray; print(ray.__version__)", "no runs of several processes"),
}
NEEDED_BY_A_RUN = ("torch.cuda", "SGLang's kernels", "Ray")


@dataclass(frozen=True)
class Check:
    """Tests that are tried together, as arguments for pytest. on_device: of memory that the host does not have.

    each_s: most seconds of one test.
    """

    what: str
    tests: tuple[str, ...]
    on_device: bool = False
    each_s: float = TEST_S


GPT = "tests/models/test_gpt.py"
CHECKS = (
    Check("memory of the device; sleep and wake, in bytes", ("tests/gpu/test_device.py",), True),
    Check("log-probs against transformers, float32", (GPT, "-k", "packed_logprobs_equal")),
    Check("log-probs against transformers, bfloat16", (GPT, "-k", "in_bfloat16_are_near")),
    Check("gradients against transformers", (GPT, "-k", "gradients_equal")),
    Check("optimizer steps of a policy", ("tests/training/test_engine.py",)),
    Check("device memory of one process read by another (CUDA IPC)", ("tests/gpu/test_ipc.py",), True),
    Check("packing", ("tests/models/test_attention.py", "tests/training/test_logprob.py", GPT, "-k", "not recomputed")),
    Check("recomputed activations", (GPT, "tests/training/test_roles.py", "-k", "recompute or replayed")),
    Check("LoRA", ("tests/models/test_lora.py", "-k", "not TestLayouts")),
    Check("sleep and wake, bit for bit", ("tests/training/test_offload.py",)),
    Check("checkpoints", ("tests/training/test_checkpoint.py",)),
    Check("training: all else of one rank", ("tests/training", "-m", "not slow")),
    Check("models: all else of one rank", ("tests/models", "-m", "not slow")),
    Check("weights to servers: what needs no server", ("tests/sync", "-m", "not slow")),
    Check("several ranks", ("tests/models", "tests/training"), each_s=STARTING_S),
    Check("weights to servers", ("tests/sync",), each_s=STARTING_S),
    Check("processes of a run", ("tests/cluster",), each_s=STARTING_S),
)
RECIPE = """
run: {{name: gpu-check, dir: {folder}/runs}}
cluster: {{platform: cuda, devices: 1}}
model: {{path: {folder}/model, dtype: bfloat16}}
data: {{train: {folder}/data/train.jsonl, eval: {folder}/data/eval.jsonl, max_prompt_tokens: 64}}
rollout:
  prompts_per_step: 8
  samples_per_prompt: 4
  max_response_tokens: 64
  server_args: [--attention-backend, triton]  # the others want wider heads than a tiny model has
algorithm: {{kl_coef: 0.01}}
train: {{steps: 5}}
"""


@dataclass(frozen=True)
class Row:
    """One thing that was looked at. verdict: works, absent, failed, or not run."""

    what: str
    verdict: str
    detail: str
    seconds: float = 0.0
    platform: str = ""


@dataclass(frozen=True)
class Place:
    """On what is checked, until when (seconds of the epoch), and where results go."""

    platform: str
    until: float
    folder: Path

    @property
    def tests(self) -> Path:
        """What became of every test."""
        return self.folder / "gpu_check_tests.jsonl"

    @property
    def rows(self) -> Path:
        """The table's rows."""
        return self.folder / "gpu_check.jsonl"

    @property
    def log(self) -> Path:
        """What pytest said."""
        return self.folder / "gpu_check.log"

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.until - time.time()


def run(argv: list[str], timeout_s: float) -> tuple[int, str]:
    """Exit code and output of a command; a deadline that passes is an exit code, too."""
    try:
        done = subprocess.run(
            argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        said = said.decode(errors="replace") if isinstance(said, bytes) else said
        return -1, f"{said}\ndid not end within {timeout_s:.0f} s".strip()
    return done.returncode, done.stdout.strip()


def run_logged(argv: list[str], timeout_s: float, log: Path, variables: Mapping[str, str]) -> tuple[int, str]:
    """As `run`, into a file from the first word on: whoever is killed meanwhile leaves there what was said.

    What it has started ends with it: ranks of a test that hangs would keep the device's memory, and wait for their peers.
    """
    mark = secrets.token_hex(8)
    with log.open("ab") as file:
        begin = file.tell()
        environment = {**os.environ, **variables, STARTED: mark}
        try:
            status = subprocess.run(
                argv, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=timeout_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
            file.write(f"\ndid not end within {timeout_s:.0f} s\n".encode())
        finally:
            end_all(mark)
    return status, log.read_bytes()[begin:].decode(errors="replace").strip()


def end_all(mark: str) -> None:
    """End what was started with this mark; janitors of runs, which clean behind what is ended here, end by themselves."""
    started = janitor.processes_with(STARTED, mark)
    janitor.kill_all(pid for pid in started if janitor.__name__ not in command_of(pid))


def command_of(pid: int) -> str:
    """A process's command line; nothing where it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def look_at_part(name: str) -> Row:
    """Whether a part loads."""
    code, cost = PARTS[name]
    began = time.monotonic()
    status, output = run([sys.executable, "-c", code], IMPORT_S)
    last, took = output.splitlines()[-1] if output else "", round(time.monotonic() - began, 1)
    return Row(name, "works", last, took) if status == 0 else Row(name, "absent", f"{last}; {cost}", took)


def run_check(check: Check, place: Place) -> Row:
    """Its tests that were not run before, in a process of their own."""
    if place.left_s <= 0:
        return Row(check.what, "not run", LATE)
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", *pytest_words(check, place)]
    while True:
        known = outcomes(place.tests)
        with place.log.open("a") as log:
            log.write(f"=== {check.what}: {' '.join(check.tests)}\n")
        # What is under way when the time is over may end: no test begins any more.
        status, output = run_logged(command, place.left_s + LAST_S, place.log, {OF: check.what})
        new = [line for name, line in outcomes(place.tests).items() if line != known.get(name)]
        # A process that the device, or a test, has ended, with whatever exit code: the other tests get another.
        whole = status in (0, 1, NOTHING_LEFT) and not [line for line in new if line["outcome"] == "begun"]
        if whole or not new or place.left_s <= 0:
            break
    found = [line for line in outcomes(place.tests).values() if line["of"] == check.what]
    return summed_up(check.what, found, status, output, round(time.monotonic() - began, 1))


def pytest_words(check: Check, place: Place) -> list[str]:
    """The arguments of pytest."""
    options = ["--platform", place.platform, "--may-lack", "--results", str(place.tests), "--until", str(place.until)]
    options += [word for plugin in PLUGINS for word in ("-p", plugin)]
    options += ["--continue-on-collection-errors"]  # else a file that does not import takes its folder away
    # A signal ends a test where Python has the word; faulthandler ends the process of one that hangs in CUDA's code.
    options += ["--timeout", str(check.each_s), "-o", f"faulthandler_timeout={check.each_s + HANGING_S}"]
    options += ["-o", "faulthandler_exit_on_timeout=true"]
    return [*options, "-q", "-p", "no:cacheprovider", "--durations=0", "--no-header", *check.tests]


def outcomes(file: Path) -> dict[str, dict[str, str]]:
    """The last line of each test, by its name."""
    return {line["test"]: line for line in whole_lines(file)}


def summed_up(what: str, found: Sequence[dict[str, str]], status: int, output: str, seconds: float) -> Row:
    """A row of what became of the tests of a check. status: pytest's."""
    passed = [each for each in found if each["outcome"] == "passed"]
    failed = [each for each in found if each["outcome"] in ("failed", "begun")]
    reasons = Counter(each["why"] for each in found if each["outcome"] in ("lacking", "late"))
    words = [f"{len(passed)} passed"] if passed else []
    words += [f"{count} {NOT_TRIED}: {why}" for why, count in reasons.most_common()]
    if failed:
        words.insert(0, f"{len(failed)} failed, the first {failed[0]['test']}: {failed[0]['why'][:300]}")
    elif status not in (0, NOTHING_LEFT):
        words.insert(0, f"pytest ended with {status}: {output[-300:]}")
    if failed or status not in (0, NOTHING_LEFT):
        return Row(what, "failed", "; ".join(words), seconds)
    return Row(what, "works" if passed else "not run", "; ".join(words) or LATE, seconds)


def run_end_to_end(place: Place) -> Row:
    """A tiny model trained on one GPU, which the rank and the server share."""
    if place.left_s <= 0:
        return Row(ONE_RUN, "not run", LATE)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megarl-gpu-check-") as name:
        folder = Path(name)
        (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
        commands = [
            ["tools/make_tiny_model.py", "--out", str(folder / "model")],
            ["tools/make_arithmetic.py", "--out", str(folder / "data")],
            ["-m", "megarl", "train", str(folder / "recipe.yaml")],
        ]
        for command in commands:
            status, output = run([sys.executable, *command], max(0, place.left_s) + LAST_S)
            if status != 0:
                detail = f"{' '.join(command[:3])}: {output[-2000:]}"
                return Row(ONE_RUN, "failed", detail, round(time.monotonic() - began, 1))
        steps = (folder / "runs" / "gpu-check" / "metrics.jsonl").read_text().splitlines()
        last = json.loads(steps[-1])
    difference = last["rollout/logprob_diff_max"]
    detail = f"5 steps, rollout against trainer {difference:.2g} nats"
    return Row(ONE_RUN, "works", detail, round(time.monotonic() - began, 1))


def check(place: Place) -> Iterator[Row]:
    """Everything, in order, as it comes; what cannot work without an absent part is not tried."""
    on_device, known = place.platform == "cuda", complete(place.rows)
    there = set()
    for name in PARTS if on_device else [name for name in PARTS if name not in NEEDED_BY_A_RUN]:
        row = known.get(name) or look_at_part(name)  # a cold one may take a minute
        there |= {name} if row.verdict == "works" else set()
        yield row
    for each in CHECKS:
        if not on_device and each.on_device:
            continue
        if each.what in known:
            yield known[each.what]
            continue
        lacking = on_device and "torch.cuda" not in there
        yield Row(each.what, "not run", "needs torch.cuda") if lacking else run_check(each, place)
    if on_device and ONE_RUN in known:
        yield known[ONE_RUN]
    elif on_device:
        absent = [name for name in NEEDED_BY_A_RUN if name not in there]
        yield Row(ONE_RUN, "not run", f"needs {' and '.join(absent)}") if absent else run_end_to_end(place)


def begin(place: Place, *, go_on: bool) -> None:
    """A folder for results; those of an earlier call go, or stay but for the tests that it did not try."""
    place.folder.mkdir(parents=True, exist_ok=True)
    if not go_on:
        for old in (place.tests, place.rows, place.log):
            old.unlink(missing_ok=True)
    place.rows.write_text(
        "".join(json.dumps(asdict(row)) + "\n" for row in rows_of(place.rows))
    )  # the last may be half a line
    kept = [line for line in outcomes(place.tests).values() if line["outcome"] in TRIED]
    place.tests.write_text("".join(json.dumps(line) + "\n" for line in kept))


def rows_of(file: Path) -> list[Row]:
    """Of an earlier call."""
    return [Row(**line) for line in whole_lines(file)]


def complete(file: Path) -> dict[str, Row]:
    """The rows of an earlier call that are as good as they can be."""
    last = {row.what: row for row in rows_of(file)}
    return {what: row for what, row in last.items() if row.verdict == "works" and NOT_TRIED not in row.detail}


def table(rows: Sequence[Row]) -> str:
    """For people: a row a line, and its detail below where it is long."""
    lines = []
    for row in rows:
        head = f"{row.verdict:8} {row.seconds:7.1f} s  {row.what}"
        lines.append(f"{head}: {row.detail}" if len(head) + len(row.detail) < WIDTH else f"{head}\n{'':20}{row.detail}")
    return "\n".join(lines)


def well(rows: Sequence[Row]) -> bool:
    """Whether all that could be tried was, and works; where nothing worked but packages, nothing was checked."""
    parts = {row.what: row.verdict for row in rows if row.what in PARTS}
    checked = [row for row in rows if row.what not in PARTS and row.verdict == "works"]
    device = parts.get("torch.cuda", "works") == "works"  # it is not among the rows of a CPU
    return device and bool(checked) and not [row for row in rows if row.verdict == "failed" or LATE in row.detail]


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What of megarl works on this machine's GPUs.")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no test begins")
    parser.add_argument("--go-on", action="store_true", help="keep the results that are there, and try what is left")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder for the results")
    return parser.parse_args(words)


def main() -> int:
    """Refuse without a GPU; otherwise look, show, write."""
    chosen = parsed()
    if chosen.platform == "cuda" and not cuda_device_count():
        print(
            "megarl: gpu-check needs an NVIDIA GPU, and this machine shows none (/dev/nvidia0, CUDA_VISIBLE_DEVICES)."
        )
        return 2
    place = Place(chosen.platform, time.time() + 60 * chosen.minutes, chosen.out.absolute())
    if chosen.go_on and (
        other := {row.platform or "an earlier check" for row in rows_of(place.rows)} - {place.platform}
    ):
        print(f"megarl: {place.rows} is of {' and '.join(sorted(other))}, and --go-on keeps it: give another --out.")
        return 2
    begin(place, go_on=chosen.go_on)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    rows = []
    for row in check(place):
        rows.append(row := replace(row, platform=place.platform))
        with place.rows.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(table([row]), flush=True)
    print(f"\n{len(outcomes(place.tests))} tests in {place.tests}; what they said in {place.log}")
    return 0 if well(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
