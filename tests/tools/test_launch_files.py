"""What stands in launch/ beside the job script: untried, and at least of one piece with the rest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import megarl
from megarl.core.ray_env import HEALTH_CHECKS
from megarl.recipe.load import load_recipe

ROOT = Path(megarl.__file__).parent.parent


@pytest.fixture(scope="module")
def pinned() -> dict[str, str]:
    """Versions that megarl is pinned to."""
    text = (ROOT / "setup.py").read_text()
    return dict(re.findall(r'"([a-z-]+)": "([\d.]+)"', text))


def test_the_image_installs_what_the_package_names(pinned: dict[str, str]) -> None:
    """In the order of requirements/README.md: what is pinned beside torch and SGLang comes with the package."""
    files = ("launch/Dockerfile", "setup.py", "requirements/README.md")
    text, package, order = ((ROOT / file).read_text() for file in files)
    installed = re.findall(r"^RUN pip install (.*)$", text, re.MULTILINE)
    assert installed == [
        f"'torch=={pinned['torch']}' 'sglang=={pinned['sglang']}' setuptools wheel",
        f"--no-build-isolation -e '.[gpu]' 'ray[default]=={pinned['ray']}'",
    ]
    assert f"\npip install {installed[0]}\npip install --no-build-isolation -e .[gpu]\n".replace("'", "") in order
    [base] = re.findall(r"^ARG BASE=nvidia/cuda:(\d+)\.\S+-devel-\S+$", text, re.MULTILINE)
    assert f"core_cu{base}" in package, "Transformer Engine's core is of the CUDA that nvcc is of"
    [minor] = re.findall(r"^RUN python3\.(\d+) -m venv", text, re.MULTILINE)
    assert f"python3.{minor}-dev" in text and int(minor) >= 11 and 'python_requires=">=3.11"' in package


def test_the_image_holds_nothing_that_git_leaves_out() -> None:
    left_out = (ROOT / "launch" / "Dockerfile.dockerignore").read_text().splitlines()
    names = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line]
    assert {name.removeprefix("**/") for name in left_out} >= {*names, ".git"}


def test_the_manifest_runs_a_recipe_on_the_ray_that_is_pinned(pinned: dict[str, str]) -> None:
    spec: dict[str, Any] = yaml.safe_load((ROOT / "launch" / "k8s" / "rayjob.yaml").read_text())["spec"]
    cluster = spec["rayClusterSpec"]
    assert cluster["rayVersion"] == pinned["ray"]
    words = spec["entrypoint"].split()
    assert words[:4] == ["python", "-m", "megarl", "train"] and words[-1] == "--continue"
    assert not set("$`\"'\\") & set(spec["entrypoint"]), "the shell of the pod that submits reads it first"
    start = next(index for index, word in enumerate(words) if word.endswith(".yaml"))
    path = ROOT / words[start].removeprefix("/opt/megarl/")
    recipe = load_recipe(path, words[start + 1 : -1]).recipe
    [workers] = cluster["workerGroupSpecs"]
    gpus = workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    used = recipe.cluster.devices + (0 if recipe.rollout.offload else recipe.rollout.server_devices)
    assert int(gpus) * workers["replicas"] == used
    for group in (cluster["headGroupSpec"], workers):
        env = {each["name"]: each.get("value") for each in group["template"]["spec"]["containers"][0]["env"]}
        assert HEALTH_CHECKS.items() <= env.items() and not [name for name in env if name.startswith("RAY_AUTH")]
    assert cluster["authOptions"] == {"mode": "token"}, "the pod that submits gets the token by this alone"
