"""The wheel by itself: installed outside of the checkout, in an environment that has the locked packages but no megarl."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("megarl", "recipes", "launch", "tools", "setup.py", "pyproject.toml", "README.md", "LICENSE")
# Every command of every group, in one process.
HELP = """if True:
    import megarl, sys, typer.main
    from typer.testing import CliRunner
    from megarl.command_line import app
    assert megarl.__file__.startswith(sys.prefix), megarl.__file__
    def walk(command, words):
        result = CliRunner().invoke(app, [*words, "--help"])
        assert result.exit_code == 0 and "Usage" in result.output, (words, result.output)
        print("megarl", *words)
        for name, below in getattr(command, "commands", {}).items():
            walk(below, [*words, name])
    walk(typer.main.get_command(app), [])
"""


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment `env`, where the wheel is installed: the other packages are those of this environment."""
    folder = tmp_path_factory.mktemp("outside")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run([*pip, *build], check=True, timeout=120)
    shutil.rmtree(source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True, timeout=60)
    python = folder / "env" / "bin" / "python"
    [wheel] = folder.glob("megarl-*.whl")
    install = ["--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *install], check=True, timeout=120)
    # What a .pth names is on the path, but its own .pth files are not read: this environment's megarl stays away.
    [packages] = (folder / "env").glob("lib/python*/site-packages")
    (packages / "locked.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


def call(folder: Path, *words: str, code: int = 0) -> str:
    """What a command says, in a folder that has nothing of a checkout."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    path = f"{folder / 'env' / 'bin'}:{env['PATH']}"
    env |= {"PATH": path, "COLUMNS": "200", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, f"{words}: {done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.slow
def test_every_command_works_from_the_wheel(outside: Path) -> None:
    said = call(outside, "python", "-c", HELP).splitlines()
    for command in ("train", "eval", "plan", "submit", "recipe copy", "convert hf-to-mcore", "doctor", "quickstart"):
        assert f"megarl {command}" in said

    listed = call(outside, "megarl", "recipe", "list").splitlines()
    assert len(listed) == len([path for path in (ROOT / "recipes").glob("*.yaml") if path.stem != "quickstart_base"])
    assert any(line.split()[:5] == ["qwen3_4b_grpo_8", "megarl", "train", "8", "GPUs"] for line in listed)
    assert "recipe copy quickstart_ppo" in call(outside, "megarl", "train", "recipes/quickstart_ppo.yaml", code=2)
    copied = call(outside, "megarl", "recipe", "copy", "quickstart_ppo", "mine").split()
    assert copied == ["mine/quickstart_ppo.yaml", "mine/quickstart_base.yaml"]
    assert "mine/quickstart.yaml" in call(outside, "megarl", "recipe", "copy", "quickstart", "mine")  # on the same base
    assert "is there already" in call(outside, "megarl", "recipe", "copy", "quickstart", "mine", code=2)

    call(outside, "megarl", "quickstart")
    model, recipe = ".cache/quickstart/model", "recipes/quickstart.yaml"
    named = f"model.path={model}"
    assert "prompts_per_step: 16" in call(outside, "megarl", "recipe", "show", recipe)
    call(outside, "megarl", "plan", recipe, named, "--device", "H100")
    script = call(outside, "megarl", "submit", recipe, named, "--slurm", "--nodes", "2", "--dry-run")
    assert "#SBATCH --nodes=2" in script and f"{outside}/env/bin/python -m megarl.launch.leader" in script
    call(outside, "megarl", "convert", "hf-to-mcore", model, "checkpoint")
    assert (outside / "checkpoint" / "megarl.json").exists()
    assert "megarl can run here" in call(outside, "megarl", "doctor")
    for command in ("train", "eval"):  # the warm start has not been run: no paths of three words are names on the hub
        assert "runs/quickstart-sft/hf does not exist" in call(outside, "megarl", command, recipe, code=2)
