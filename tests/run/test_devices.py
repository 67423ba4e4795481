"""Devices that a run asks for, and what of a user's environment would break them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.core.ray_env import JOB_ADDRESS_VARIABLE, JOB_VARIABLE
from megarl.recipe.load import load_recipe
from megarl.run.devices import LONGEST_SOCKET, SOCKET, check_devices
from tests.support.bad_input import Place, good_place
from tests.support.tiny import write_tiny_qwen


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return good_place(tmp_path_factory.mktemp("place"), write_tiny_qwen(tmp_path_factory.mktemp("model")))


def test_more_devices_than_the_machine_shows(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.core.platform.cuda_device_count", lambda: 2)
    recipe = load_recipe(place.recipe, ["cluster.platform=cuda", "cluster.devices=4"]).recipe
    with pytest.raises(UserError, match=r"cluster\.devices is 4, and this machine shows 2 cuda devices"):
        check_devices(recipe)
    assert check_devices(load_recipe(place.recipe, ["cluster.devices=4"]).recipe).name == "cpu"
    monkeypatch.setattr("megarl.core.platform.cuda_device_count", lambda: 0)
    with pytest.raises(UserError, match=r"shows no cuda devices\. Make some visible, or set cluster\.platform to cpu"):
        check_devices(recipe)


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "handles of memory"),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True", "handles of memory"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "handles of memory"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "handles of memory"),
        ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1", "show every rank all devices"),
        ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "True", "show every rank all devices"),
    ],
)
def test_variables_that_break_a_run_on_devices_are_named(
    place: Place, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, why: str
) -> None:
    monkeypatch.setattr("megarl.core.platform.cuda_device_count", lambda: 2)
    on_cuda, on_cpu = (load_recipe(place.recipe, [f"cluster.platform={name}"]).recipe for name in ("cuda", "cpu"))
    check_devices(on_cuda)
    monkeypatch.setenv(variable, value)
    check_devices(on_cpu)
    with pytest.raises(UserError, match=f"The environment has {variable}={value}, and .*{why}.*Unset it"):
        check_devices(on_cuda)
    for word, harmless in (("True", "False"), ("1", "0"), ("cudaMallocAsync", "native")):
        value = value.replace(word, harmless)
    monkeypatch.setenv(variable, value)
    check_devices(on_cuda)


@pytest.mark.parametrize("variable", ["NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"])
def test_an_attention_that_is_switched_off_is_named_on_every_platform(
    place: Place, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """As images with Transformer Engine have it: Megatron would end each rank, by words about an option of its own."""
    monkeypatch.setattr("megarl.core.platform.cuda_device_count", lambda: 2)
    for name in ("cuda", "cpu"):
        recipe = load_recipe(place.recipe, [f"cluster.platform={name}"]).recipe
        monkeypatch.setenv(variable, "0")
        with pytest.raises(
            UserError, match=f"The environment has {variable}=0, and Megatron builds no model .*Unset it"
        ):
            check_devices(recipe)
        monkeypatch.setenv(variable, "1")
        check_devices(recipe)


@pytest.mark.parametrize(
    "workers", [{}, {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}], ids=["driver alone", "workers"]
)
def test_a_ray_job_gives_its_command_a_variable_that_workers_do_not_get(
    place: Place, monkeypatch: pytest.MonkeyPatch, workers: dict[str, str]
) -> None:
    """Ray sets it in every job that asks for no devices for its command, which has none to be shown."""
    on_cuda = load_recipe(place.recipe, ["cluster.platform=cuda", "cluster.devices=64"]).recipe
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv(JOB_VARIABLE, json.dumps({"runtime_env": {"env_vars": workers}}))
    monkeypatch.setenv(JOB_ADDRESS_VARIABLE, "10.0.0.1:6379")
    if workers:
        with pytest.raises(UserError, match="show every rank all devices"):
            check_devices(on_cuda)
    else:
        assert check_devices(on_cuda).name == "cuda"  # how many devices the job's Ray has is seen once it is joined
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        with pytest.raises(UserError, match="handles of memory"):
            check_devices(on_cuda)


def test_a_temporary_folder_that_is_too_deep_for_sockets(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(place.recipe, ["cluster.platform=cpu"]).recipe
    longest = LONGEST_SOCKET - len(f"/megarl-01234567/{SOCKET}")
    for length in (longest, longest + 1):
        above = f"/{'t' * (length - 1)}"
        monkeypatch.setattr("tempfile.tempdir", f"{above}/megarl-01234567/tmp")
        if length == longest:
            check_devices(recipe)
            continue
        check_devices(recipe, here=False)
        with pytest.raises(
            UserError, match=rf"The temporary folder {above} has too long a path, by 1 characters: .* TMPDIR"
        ):
            check_devices(recipe)


def test_a_folder_that_ray_cannot_tell_of(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=r"called in, '.*caf\\udce9', has a name that is not UTF-8"):
        check_devices(load_recipe(place.recipe, ["cluster.platform=cpu"]).recipe)


def test_a_temporary_folder_with_letters_that_ray_does_not_take(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start ended with `'ascii' codec can't encode character`, half a minute later."""
    recipe = load_recipe(place.recipe, ["cluster.platform=cpu"]).recipe
    monkeypatch.setattr("tempfile.tempdir", "/tmp/blank and é/megarl-01234567/tmp")
    check_devices(recipe, here=False)
    with pytest.raises(UserError, match=r"The temporary folder /tmp/blank and é has letters .* not ASCII.* TMPDIR"):
        check_devices(recipe)


@pytest.mark.parametrize(
    ("setup", "why"),
    [
        ("", "Network is unreachable"),
        ("ip link set lo up; ip address del 127.0.0.1/8 dev lo;", "Cannot assign requested address"),
    ],
    ids=["loopback is down", "IPv6 alone"],
)
def test_a_machine_whose_processes_do_not_reach_each_other(place: Place, setup: str, why: str) -> None:
    """Ray waits for minutes, and says that a file of its own did not come."""
    code = "import sys; from megarl.run.devices import check_devices; from megarl.recipe.load import load_recipe\n"
    code += "check_devices(load_recipe(__import__('pathlib').Path(sys.argv[1]), []).recipe)"
    words = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", f'{setup} exec "$0" "$@"', sys.executable]
    done = subprocess.run(
        [*words, "-c", code, str(place.recipe)], capture_output=True, text=True, check=False, timeout=60
    )
    assert f"UserError: Processes of this machine do not reach each other at 127.0.0.1 ({why})" in done.stderr
