"""The quickstart's runs, from nothing or from a warm start that is there: for benchmarks of learning."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def call(*command: str) -> float:
    """Run a command in the repository's root; its seconds. Its output is shown when it fails."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} exited with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return time.monotonic() - began


def warm_start(seed: int, folder: Path) -> float:
    """Model, task and SFT of a seed, in `folder`; the seconds of the SFT."""
    shutil.rmtree(folder, ignore_errors=True)
    call("tools/make_tiny_model.py", "--out", str(folder / "model"), "--seed", str(seed))
    call("tools/make_arithmetic.py", "--out", str(folder / "data"), "--seed", str(seed))
    return call(
        *("-m", "megarl", "sft", "recipes/quickstart_sft.yaml", *_common(seed, folder, "sft")),
        *(f"model.path={folder}/model", f"data.train={folder}/data/sft.jsonl"),
    )


def train(recipe: str, name: str, seed: int, folder: Path, overrides: list[str]) -> float:
    """A run of `megarl train` from the warm start of `folder`, as `folder/name`; its seconds."""
    shutil.rmtree(folder / name, ignore_errors=True)
    return call(
        *("-m", "megarl", "train", f"recipes/{recipe}.yaml", *_common(seed, folder, name)),
        *(f"model.path={folder}/sft/hf", f"data.train={folder}/data/train.jsonl"),
        *(f"data.eval={folder}/data/eval.jsonl", *overrides),
    )


def metrics(run: Path) -> list[dict[str, Any]]:
    """What a run wrote, a row a step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def accuracy(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Step -> held-out accuracy."""
    return {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}


def _common(seed: int, folder: Path, name: str) -> list[str]:
    return [f"run.dir={folder}", f"run.seed={seed}", f"run.name={name}"]
