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


def test_the_image_installs_the_pinned_versions(pinned: dict[str, str]) -> None:
    """All but torch, which the base brings."""
    text = (ROOT / "launch" / "Dockerfile").read_text()
    installed = dict(re.findall(r"'([a-z-]+)(?:\[\w+\])?==([\d.]+)'", text))
    assert installed == {name: version for name, version in pinned.items() if name != "torch"}
    assert re.search(r"^ARG BASE=\S+:\S+$", text, re.MULTILINE)


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
    used = recipe.cluster.devices + recipe.rollout.server_devices
    assert int(gpus) * workers["replicas"] == used
    for group in (cluster["headGroupSpec"], workers):
        env = {each["name"]: each.get("value") for each in group["template"]["spec"]["containers"][0]["env"]}
        assert HEALTH_CHECKS.items() <= env.items() and not [name for name in env if name.startswith("RAY_AUTH")]
    assert cluster["authOptions"] == {"mode": "token"}, "the pod that submits gets the token by this alone"
