"""What of megarl works on this machine's GPUs: the parts that are there, the tests marked `gpu`, one run end to end.

    python -m tools.gpu_check            # or: make gpu-check

Each part is imported in a process of its own, because a package that is installed and does not load is as good as absent.
Writes bench/results/gpu_check.json. Exit codes: 0 all well, 1 something does not work, 2 there is no GPU here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.core.platform import cuda_device_count

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "gpu_check.json"
IMPORT_S, TESTS_S, RUN_S = 300, 3600, 1800
NO_TESTS = 5  # pytest's exit code where none was selected

TORCH = """
import torch
assert torch.cuda.is_available(), "torch sees no device"
print(torch.__version__, torch.cuda.get_device_name())
"""
PARTS = {
    "torch.cuda": (TORCH, "nothing runs on GPUs"),
    "SGLang's kernels": ("import sgl_kernel; print(sgl_kernel.__version__)", "no server starts on GPUs: no rollout"),
    "Transformer Engine": (
        "import transformer_engine as te, transformer_engine.pytorch; print(te.__version__)",
        "Megatron's own layers: slower, no FP8, no context-parallel attention",
    ),
}
NEEDED_BY_A_RUN = ("torch.cuda", "SGLang's kernels")
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


def run(argv: list[str], timeout_s: float) -> tuple[int, str]:
    """Exit code and output of a command; a deadline that passes is an exit code, too."""
    try:
        done = subprocess.run(
            argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"did not end within {timeout_s:g} s"
    return done.returncode, done.stdout.strip()


def timed(look: Callable[[], Row]) -> Row:
    """A row with its time."""
    began = time.monotonic()
    row = look()
    return Row(row.what, row.verdict, row.detail, round(time.monotonic() - began, 1))


def look_at_part(name: str) -> Row:
    """Whether a part loads."""
    code, cost = PARTS[name]
    status, output = run([sys.executable, "-c", code], IMPORT_S)
    last = output.splitlines()[-1] if output else ""
    return Row(name, "works", last) if status == 0 else Row(name, "absent", f"{last}; {cost}")


def run_tests() -> Row:
    """The tests that need a GPU."""
    status, output = run([sys.executable, "-m", "pytest", "-q", "-m", "gpu"], TESTS_S)
    last = output.splitlines()[-1] if output else ""
    if status == NO_TESTS:
        return Row("tests marked gpu", "failed", "none was found")
    return Row("tests marked gpu", "works" if status == 0 else "failed", last)


def run_end_to_end() -> Row:
    """A tiny model trained on one GPU, which the rank and the server share."""
    with tempfile.TemporaryDirectory(prefix="megarl-gpu-check-") as name:
        folder = Path(name)
        (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
        commands = [
            ["tools/make_tiny_model.py", "--out", str(folder / "model")],
            ["tools/make_arithmetic.py", "--out", str(folder / "data")],
            ["-m", "megarl", "train", str(folder / "recipe.yaml")],
        ]
        for command in commands:
            status, output = run([sys.executable, *command], RUN_S)
            if status != 0:
                return Row("one run on one GPU", "failed", f"{' '.join(command[:3])}: {output[-2000:]}")
        steps = (folder / "runs" / "gpu-check" / "metrics.jsonl").read_text().splitlines()
        last = json.loads(steps[-1])
    difference = last["rollout/logprob_diff_max"]
    return Row("one run on one GPU", "works", f"5 steps, rollout against trainer {difference:.2g} nats")


def check() -> list[Row]:
    """Everything, in order; what cannot work without an absent part is not tried."""
    rows = [timed(lambda name=name: look_at_part(name)) for name in PARTS]  # type: ignore[misc]
    there = {row.what for row in rows if row.verdict == "works"}
    for what, needed, look in (
        ("tests marked gpu", ("torch.cuda",), run_tests),
        ("one run on one GPU", NEEDED_BY_A_RUN, run_end_to_end),
    ):
        lacking = [name for name in needed if name not in there]
        rows.append(Row(what, "not run", f"needs {' and '.join(lacking)}") if lacking else timed(look))
    return rows


def main() -> int:
    """Refuse without a GPU; otherwise look, show, write."""
    if not cuda_device_count():
        print(
            "megarl: gpu-check needs an NVIDIA GPU, and this machine shows none (/dev/nvidia0, CUDA_VISIBLE_DEVICES)."
        )
        return 2
    from rich.console import Console
    from rich.table import Table

    rows = check()
    table = Table(title="megarl on GPUs", title_justify="left")
    for column in ("part", "", "detail", "seconds"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row.what, row.verdict, row.detail, f"{row.seconds:g}")
    Console().print(table)
    RESULT.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0 if all(row.verdict == "works" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
