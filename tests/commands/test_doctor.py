from __future__ import annotations

import dataclasses
import importlib.util
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megarl.commands import doctor
from megarl.commands.doctor import Diagnosis, Finding, Level, diagnose, render
from megarl.core.platform import get_platform
from megarl.models import layer_spec

CPU = get_platform("cpu")
CUDA = get_platform("cuda")
UTILS = "transformer_engine.pytorch.attention.dot_product_attention.utils"
GPU_ONLY = {"transformer-engine", "sglang-kernel", "torch-memory-saver", "apex (NVIDIA)"}


def find(diagnosis: Diagnosis, part: str) -> Finding:
    return next(finding for finding in diagnosis.findings if finding.part == part)


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def pretend(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None]) -> None:
    real = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: versions[name] if name in versions else real(name))


def test_this_environment_can_run_on_the_cpu() -> None:
    diagnosis = diagnose(CPU)
    assert diagnosis.can_run
    for part in ("torch", "megatron-core", "sglang", "sglang-router", "ray", "transformers"):
        finding = find(diagnosis, part)
        assert finding.level is Level.OK
        assert finding.found.partition("+")[0] == finding.wanted


def test_what_only_gpus_use_is_no_complaint_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, dict.fromkeys(["transformer-engine", "sglang-kernel", "apex"]))
    monkeypatch.setattr(doctor, "_find", lambda module: None)
    diagnosis = diagnose(CPU)
    assert {finding.level for finding in diagnosis.findings if finding.part in GPU_ONLY} == {Level.OK}


def test_gpu_platform_without_gpus_kernels_and_cuda_torch_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, dict.fromkeys(["transformer-engine", "sglang-kernel", "apex"]))
    monkeypatch.setattr(doctor, "cuda_device_count", lambda: 0)
    monkeypatch.setattr(doctor, "_find", lambda module: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name, path=None: name)
    diagnosis = diagnose(CUDA)
    assert not diagnosis.can_run
    fatal = {finding.part for finding in diagnosis.findings if finding.level is Level.FATAL}
    assert fatal == {"NVIDIA devices", "torch's CUDA", "sglang-kernel"}
    assert find(diagnosis, "transformer-engine").level is Level.NOTE
    assert "slower" in find(diagnosis, "apex (NVIDIA)").cost


def test_devices_that_this_torch_cannot_use_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cuda_device_count", lambda: 2)
    monkeypatch.setattr(doctor, "_torch_cuda", lambda: None)
    diagnosis = diagnose(CPU)
    assert find(diagnosis, "NVIDIA devices").found.startswith("2 visible") and diagnosis.can_run
    finding = find(diagnosis, "torch's CUDA")
    assert finding.level is Level.NOTE and "built for CPUs" in finding.cost


@pytest.mark.parametrize("part", ["torch", "megatron-core", "sglang", "sglang-router", "ray", "transformers"])
def test_a_missing_part_that_a_run_needs_is_fatal_and_says_its_cost(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    pretend(monkeypatch, {part: None})
    diagnosis = diagnose(CPU)
    finding = find(diagnosis, part)
    assert (finding.level, finding.found) == (Level.FATAL, "not installed")
    assert finding.cost
    assert not diagnosis.can_run


def test_transformer_engine_has_to_load_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part for torch is built on the machine, and may be of another torch."""
    pretend(monkeypatch, {"transformer-engine": "2.11.0"})
    finding = find(diagnose(CUDA), "transformer-engine")
    assert finding.level is Level.FATAL and "No module named 'transformer_engine'" in finding.cost
    assert find(diagnose(CPU), "transformer-engine").level is Level.OK
    assert doctor.load_trouble("json") == ""


def test_a_compiler_is_looked_for_where_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name, path=None: {"clang": "/usr/bin/clang"}.get(name))
    assert find(diagnose(CUDA), "C compiler").found == "/usr/bin/clang"
    monkeypatch.setenv("CC", "mycc")
    assert find(diagnose(CUDA), "C compiler").level is Level.NOTE
    assert not [each for each in diagnose(CPU).findings if each.part == "C compiler"]


@pytest.mark.parametrize("scheme", ["posix_prefix", "posix_local"])
def test_what_triton_compiles_finds_pythons_headers(
    scheme: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A distribution's Python has them in a package of its own; by its own scheme they would be where nobody has any."""
    places = {"posix_prefix": {"include": str(tmp_path)}, "posix_local": {"include": str(tmp_path / "local")}}
    monkeypatch.setattr(doctor.sysconfig, "get_default_scheme", lambda: scheme)
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda name: places[name])
    missing = find(diagnose(CUDA), "Python's headers")
    assert (missing.level, missing.wanted) == (Level.NOTE, str(tmp_path / "Python.h")) and "python3-dev" in missing.cost
    (tmp_path / "Python.h").touch()
    assert find(diagnose(CUDA), "Python's headers").level is Level.OK
    assert not [each for each in diagnose(CPU).findings if each.part == "Python's headers"]


def test_what_servers_compile_kernels_with_is_looked_for_as_they_find_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def kernel_tools() -> dict[str, Finding]:
        return {name: find(diagnose(CUDA), name) for name in ("nvcc", "C++ compiler", "ninja")}

    (tmp_path / "python").mkdir()
    (tmp_path / "toolkit" / "bin").mkdir(parents=True)
    monkeypatch.setattr(doctor.sys, "executable", str(tmp_path / "python" / "python3"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.delenv("CXX", raising=False)
    assert all(each.level is Level.FATAL and "servers end" in each.cost for each in kernel_tools().values())
    programs = {"nvcc": "toolkit/bin/nvcc", "C++ compiler": "c++", "ninja": "python/ninja"}  # beside this Python
    for program in programs.values():
        (tmp_path / program).touch(mode=0o755)
    assert {name: each.found for name, each in kernel_tools().items()} == {
        name: str(tmp_path / program) for name, program in programs.items()
    }
    assert not [each for each in diagnose(CPU).findings if each.part in programs]


CAPABILITIES = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_flash_attention_is_wanted_where_transformer_engine_has_no_other_for_packed_sequences(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, {"transformer-engine": "2.11.0", "flash-attn": None})
    monkeypatch.setattr(doctor, "load_trouble", lambda module: "")
    monkeypatch.setattr(doctor, "cuda_device_count", lambda: 1)
    monkeypatch.setattr(doctor, "_capability", lambda: capability)
    monkeypatch.setattr(layer_spec, "compute_capability", lambda _: capability)
    monkeypatch.setitem(sys.modules, UTILS, SimpleNamespace(FlashAttentionUtils=SimpleNamespace(is_installed=False)))
    usual: Any = SimpleNamespace(head_dim=128, mla=None)
    found = [finding for finding in diagnose(CUDA).findings if finding.part == "flash-attn"]
    assert [finding.level for finding in found] == ([] if layer_spec.attends_packed(usual, CUDA) else [Level.NOTE])
    pretend(monkeypatch, {"transformer-engine": None, "flash-attn": None})
    assert "flash-attn" not in {finding.part for finding in diagnose(CUDA).findings}


def test_an_installed_flash_attention_is_shown_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"transformer-engine": "2.11.0", "flash-attn": "2.8.3"})
    monkeypatch.setattr(doctor, "load_trouble", lambda module: "")
    monkeypatch.setattr(doctor, "cuda_device_count", lambda: 1)
    monkeypatch.setattr(doctor, "_capability", lambda: (8, 9))
    assert find(diagnose(CUDA), "flash-attn").level is Level.OK


def test_this_torch_has_no_device_of_any_capability() -> None:
    assert doctor._capability() is None


def test_a_missing_optional_part_costs_something_but_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"wandb": None, "math-verify": None})
    diagnosis = diagnose(CPU)
    assert diagnosis.can_run
    assert find(diagnosis, "wandb").level is Level.NOTE
    assert "report.wandb" in find(diagnosis, "wandb").cost


def test_another_version_than_the_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"ray": "1.0", "megatron-core": "0.17.0"})
    on_cpu, on_cuda = diagnose(CPU), diagnose(CUDA)
    assert find(on_cpu, "ray").level is Level.NOTE
    assert find(on_cpu, "ray").wanted == "2.60.0"
    assert find(on_cpu, "megatron-core").level is Level.FATAL
    assert find(on_cuda, "megatron-core").level is Level.NOTE


@pytest.mark.parametrize(
    ("files", "level", "says"),
    [
        (["apex/normalization/__init__.py", "amp_C.py"], Level.OK, ""),
        (["apex/normalization/__init__.py"], Level.NOTE, "without its CUDA extensions"),
        (["apex/__init__.py"], Level.NOTE, "PyPI's `apex` is an unrelated package"),
        ([], Level.NOTE, "never from PyPI"),
    ],
)
def test_apex_is_told_from_its_namesake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: list[str], level: Level, says: str
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.syspath_prepend(tmp_path)
    for package in ("apex", "amp_C"):  # which a process whose Megatron computes on CPUs hides
        monkeypatch.delitem(sys.modules, package, raising=False)
    finding = find(diagnose(CUDA), "apex (NVIDIA)")
    assert finding.level is level
    assert says in finding.cost


def test_torchs_cuda_is_read_from_its_version_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("torch", tmp_path / "__init__.py")
    monkeypatch.setattr(doctor, "_find", lambda module: spec)
    version = tmp_path / "version.py"
    version.write_text("__version__ = '2'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    assert doctor._torch_cuda() == "13.0"
    version.write_text("cuda: Optional[str] = None\nhip: Optional[str] = '6'\n")
    assert doctor._torch_cuda() is None


def test_wandb_key(monkeypatch: pytest.MonkeyPatch, no_key: Path) -> None:
    assert find(diagnose(CPU), "wandb key").level is Level.NOTE
    (no_key / ".netrc").write_text("machine api.wandb.ai login user password secret-key\n")
    finding = find(diagnose(CPU), "wandb key")
    assert finding.found == "in ~/.netrc"
    (no_key / ".netrc").write_text("not a netrc\n")
    assert find(diagnose(CPU), "wandb key").level is Level.NOTE
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    finding = find(diagnose(CPU), "wandb key")
    assert finding.found == "in WANDB_API_KEY"
    assert "secret-key" not in str(dataclasses.asdict(finding))


@pytest.mark.parametrize(("token", "level"), [("", Level.NOTE), ("secret", Level.OK)])
def test_the_ray_that_a_run_would_join(monkeypatch: pytest.MonkeyPatch, token: str, level: Level) -> None:
    monkeypatch.delenv("MEGARL_RAY_ADDRESS", raising=False)
    assert find(diagnose(CPU), "nodes").found == "a run stays on this machine"
    monkeypatch.setenv("MEGARL_RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    finding = find(diagnose(CPU), "nodes")
    assert finding.level is level
    assert "10.0.0.1:6379" in finding.found and "secret" not in finding.found


def test_an_empty_name_of_a_ray_stops_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_RAY_ADDRESS", "")
    finding = find(diagnose(CPU), "nodes")
    assert finding.level is Level.FATAL and "Unset it" in finding.cost


def test_without_an_installation_pins_cannot_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "pins", dict)
    diagnosis = diagnose(CPU)
    assert "cannot be checked" in find(diagnosis, "pins").cost
    assert diagnosis.can_run


def test_the_table_shows_every_finding_and_a_verdict() -> None:
    diagnosis = Diagnosis("cpu", (Finding("thing", Level.FATAL, "none", "1.0", "nothing runs"),))
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(diagnosis))
    text = console.export_text()
    for part in ("thing", "cannot run", "none", "1.0", "nothing runs", "megarl cannot run here"):
        assert part in text
