"""`megarl doctor`: says what a machine has for megarl, against the pinned versions, and what each missing part costs.

Nothing heavy is imported here: versions come from package metadata, modules from where they would be found.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil
import typer
from rich.console import Console
from rich.table import Table

from megarl.core.errors import UserError
from megarl.core.keys import wandb_key_place
from megarl.core.platform import Platform, PlatformName, cuda_device_count, get_platform, num_local_devices
from megarl.core.ray_env import ray_to_join
from megarl.core.versions import installed, matches, pins

BOTH: tuple[PlatformName, ...] = ("cpu", "cuda")
APEX_USEFUL: tuple[PlatformName, ...] = ("cuda",)
GIB = 2**30
LOAD_S = 300.0
COMPILERS = ("cc", "gcc", "clang")
FLASH = "flash-attn"
PACKED_BY_CUDNN = range(9, 12)  # majors of devices on which cuDNN's attention takes packed sequences


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"  # something optional is missing or not as tested
    FATAL = "fatal"  # this platform cannot run


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, what was found, what was wanted, and what a difference costs."""

    part: str
    level: Level
    found: str
    wanted: str = ""
    cost: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All findings of a machine."""

    platform: PlatformName
    findings: tuple[Finding, ...]

    @property
    def can_run(self) -> bool:
        """Whether nothing is missing that the platform cannot run without."""
        return all(finding.level is not Level.FATAL for finding in self.findings)


@dataclass(frozen=True)
class Part:
    """A package that a run uses.

    needed: platforms that cannot run without it. exact: platforms that cannot run on another version than the pinned.
    cost: what its absence costs where it is useful. loads: module that has to load where it is useful; it may not, though it is
    installed.
    """

    distribution: str
    module: str
    cost: str
    needed: tuple[PlatformName, ...] = ()
    exact: tuple[PlatformName, ...] = ()
    useful: tuple[PlatformName, ...] = BOTH
    loads: str = ""


PARTS = (
    Part("torch", "torch", "nothing runs", needed=BOTH),
    Part("megatron-core", "megatron.core", "no training", needed=BOTH, exact=("cpu",)),
    Part("sglang", "sglang", "no rollout", needed=BOTH, exact=("cpu",)),
    Part("sglang-router", "sglang_router", "no rollout over the server pool", needed=BOTH),
    Part("ray", "ray", "no run can be started", needed=BOTH),
    Part("transformers", "transformers", "no tokenizer", needed=BOTH),
    Part("math-verify", "math_verify", "no math reward; others work"),
    Part("wandb", "wandb", "report.wandb cannot be used; metrics.jsonl and TensorBoard work"),
    Part("sglang-kernel", "sgl_kernel", "SGLang does not start on GPUs", needed=("cuda",), useful=("cuda",)),
    Part("torch-memory-saver", "torch_memory_saver", "servers with rollout.offload do not start", useful=("cuda",)),
    Part(
        "transformer-engine",
        "transformer_engine",
        "Megatron's own layers and torch's attention: slower, no FP8, no context-parallel attention",
        useful=("cuda",),
        loads="transformer_engine.pytorch",
    ),
)


def diagnose(platform: Platform | None = None) -> Diagnosis:
    """Look at this machine, for the platform that it is or for the one given."""
    platform = platform or get_platform()
    wanted = pins()
    findings = [_python(), *_devices(platform)]
    findings += [_part(part, platform.name, wanted.get(part.distribution)) for part in PARTS]
    if platform.has_device_memory:
        findings += [_compiler(), _python_headers(), *_kernel_tools(), *_flash_attention()]
    findings += [_apex(platform.name), _wandb_key(), _ray()]
    if not wanted:
        cost = "versions cannot be checked: install megarl with `pip install -e .`"
        findings.append(Finding("pins", Level.NOTE, "megarl runs from a folder and is not installed", cost=cost))
    findings += [_shared_memory(), _memory(), _disk(Path.cwd())]
    return Diagnosis(platform.name, tuple(findings))


def render(diagnosis: Diagnosis) -> Table:
    """The diagnosis as a table for the console."""
    marks = {Level.OK: "[green]ok[/]", Level.NOTE: "[yellow]note[/]", Level.FATAL: "[red]cannot run[/]"}
    verdict = "megarl can run here" if diagnosis.can_run else "megarl cannot run here until what is red is mended"
    table = Table(title=f"megarl doctor: platform {diagnosis.platform}", caption=verdict, title_justify="left")
    for column in ("part", "", "found", "wanted", "what it costs"):
        table.add_column(column, overflow="fold")
    for finding in diagnosis.findings:
        table.add_row(finding.part, marks[finding.level], finding.found, finding.wanted, finding.cost)
    return table


def _find(module: str) -> importlib.machinery.ModuleSpec | None:
    """Where the module would be imported from; looks through namespace packages without importing it."""
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None


def _python() -> Finding:
    found = sys.version.split()[0]
    level = Level.OK if sys.version_info >= (3, 11) else Level.FATAL
    return Finding("python", level, found, ">= 3.11", "" if level is Level.OK else "megarl does not import")


def _devices(platform: Platform) -> list[Finding]:
    cores = len(os.sched_getaffinity(0))
    findings = [Finding("CPU cores", Level.OK, f"{cores} usable")]
    gpus = cuda_device_count()
    wanted = num_local_devices(platform) is not None
    names = sorted({_gpu_name(info) for info in Path("/proc/driver/nvidia/gpus").glob("*/information")})
    found = f"{gpus} visible" + (f" ({', '.join(names)})" if gpus and names else "")
    level = Level.FATAL if wanted and not gpus else Level.OK if gpus else Level.NOTE
    cost = "" if gpus else "runs on the CPU: the same code, for small models and tests"
    findings.append(Finding("NVIDIA devices", level, found, "1 or more", cost))
    build = _torch_cuda()
    if wanted or build or gpus:
        level = Level.OK if build else Level.FATAL if wanted else Level.NOTE
        cost = "" if build else "this torch is built for CPUs and cannot use the devices"
        findings.append(Finding("torch's CUDA", level, build or "none", "" if build else "a CUDA build", cost))
    return findings


def _gpu_name(information: Path) -> str:
    match = re.search(r"Model:\s*(.+)", information.read_text(errors="replace"))
    return match[1].strip() if match else "unknown"


def _torch_cuda() -> str | None:
    """The CUDA version that torch was built for, read from its version file."""
    spec = _find("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    match = re.search(r"^cuda\b[^=]*= *'([^']+)'", file.read_text(), re.MULTILINE) if file.is_file() else None
    return match[1] if match else None


def _part(part: Part, platform: PlatformName, pin: str | None) -> Finding:
    version = installed(part.distribution)
    wanted = pin or ""
    if version is None:
        if platform not in part.useful:
            return Finding(part.distribution, Level.OK, "not installed", wanted, "not used on this platform")
        level = Level.FATAL if platform in part.needed else Level.NOTE
        return Finding(part.distribution, level, "not installed", wanted, part.cost)
    if pin and not matches(version, pin):
        hard = platform in part.exact
        cost = "the CPU adapter is written for that version only" if hard else "not the version that was tested"
        return Finding(part.distribution, Level.FATAL if hard else Level.NOTE, version, wanted, cost)
    if part.loads and platform in part.useful and (trouble := load_trouble(part.loads)):
        cost = f"it does not load, and no rank starts: {trouble}. Build it against this torch, or uninstall it"
        return Finding(part.distribution, Level.FATAL, version, wanted, cost)
    return Finding(part.distribution, Level.OK, version, wanted)


def load_trouble(module: str) -> str:
    """Why a module does not load, in a process of its own: the last line that it says; empty where it does."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_S, check=False)
    except subprocess.TimeoutExpired:
        return f"it took over {LOAD_S:g} s"
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else ""


def _compiler() -> Finding:
    """Triton compiles what starts its kernels, and torch what Megatron and SGLang have it compile."""
    asked = os.environ.get("CC")
    found = next(filter(None, map(shutil.which, [asked] if asked else COMPILERS)), None)
    if found:
        return Finding("C compiler", Level.OK, found)
    cost = "kernels that Triton compiles do not start: Megatron's fused ones, SGLang's. Install gcc or clang, or set CC"
    return Finding("C compiler", Level.NOTE, "none", "gcc or clang", cost)


def _python_headers() -> Finding:
    """What Triton compiles includes Python.h, from where Triton looks for it (its runtime/build.py)."""
    scheme = sysconfig.get_default_scheme()
    folder = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    header = Path(folder) / "Python.h"
    if header.is_file():
        return Finding("Python's headers", Level.OK, str(header))
    cost = "kernels that Triton compiles do not start: what starts them includes Python.h. Install this Python's (python3-dev)"
    return Finding("Python's headers", Level.NOTE, "none", str(header), cost)


def _kernel_tools() -> list[Finding]:
    """What the pinned SGLang compiles its kernels with while a server starts, found as it finds them."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = f"{home or '/usr/local/cuda'}/bin/nvcc"
    beside = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    tools = {
        "nvcc": (
            nvcc if home else shutil.which("nvcc") or nvcc,
            "Install the CUDA toolkit of torch's CUDA, or set CUDA_HOME",
        ),
        "C++ compiler": (os.environ.get("CXX", "c++"), "Install g++, or set CXX"),
        "ninja": ("ninja", "`pip install ninja`"),
    }
    findings = []
    for name, (program, advice) in tools.items():
        found = shutil.which(program, path=beside)
        cost = "" if found else f"servers end while they start: SGLang compiles kernels then. {advice}"
        level = Level.OK if found else Level.FATAL
        findings.append(Finding(name, level, found or "none", "" if found else program, cost))
    return findings


def _flash_attention() -> list[Finding]:
    """What Transformer Engine attends to packed sequences with where cuDNN has no kernel for them (models/layer_spec.py)."""
    version = installed(FLASH)
    capability = _capability() if installed("transformer-engine") and cuda_device_count() else None
    if capability is None or capability[0] in PACKED_BY_CUDNN:
        return []
    if version is not None:
        return [Finding(FLASH, Level.OK, version)]
    of = ".".join(map(str, capability))
    cost = (
        f"devices of capability {of} have no other attention of Transformer Engine's for packed sequences: its layers take "
        "torch's, which is slower, and keeps a mask for windows and under context parallel. `pip install flash-attn`"
    )
    return [Finding(FLASH, Level.NOTE, "not installed", "what this Transformer Engine takes", cost)]


def _capability() -> tuple[int, int] | None:
    """Of the first device, as torch says it in a process of its own; None where it has none."""
    words = "import torch; print(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None"
    try:
        done = subprocess.run(
            [sys.executable, "-c", words], capture_output=True, text=True, timeout=LOAD_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    found = [int(word) for word in done.stdout.split()] if done.returncode == 0 else []
    return (found[0], found[1]) if len(found) == 2 else None


def _apex(platform: PlatformName) -> Finding:
    """NVIDIA's Apex is built from source and brings `amp_C`; PyPI's `apex` is somebody else's."""
    spec = _find("apex")
    if spec is not None and _find("amp_C") is not None:
        return Finding("apex (NVIDIA)", Level.OK, installed("apex") or "found")
    places = list(spec.submodule_search_locations or ()) if spec else []
    if any((Path(place) / "normalization").is_dir() for place in places):
        cost = "built without its CUDA extensions: Transformer Engine's or torch's Adam and norms are used"
        return Finding("apex (NVIDIA)", Level.NOTE, installed("apex") or "found", "built with --cuda_ext", cost)
    if spec is not None:
        cost = "PyPI's `apex` is an unrelated package and of no use: `pip uninstall apex`, build NVIDIA's from source"
        return Finding("apex (NVIDIA)", Level.NOTE, "another package of that name", "NVIDIA/apex", cost)
    cost = "Transformer Engine's or torch's Adam and norms are used: slower. Build it from source, never from PyPI"
    if platform not in APEX_USEFUL:
        return Finding("apex (NVIDIA)", Level.OK, "not installed", "", "not used on this platform")
    return Finding("apex (NVIDIA)", Level.NOTE, "not installed", "NVIDIA/apex", cost)


def _wandb_key() -> Finding:
    place = wandb_key_place()
    if place:
        return Finding("wandb key", Level.OK, f"in {place}")
    return Finding("wandb key", Level.NOTE, "none", "", "report.wandb writes offline; send it later with `wandb sync`")


def _ray() -> Finding:
    """Whether a run would start a Ray or join one."""
    try:
        running = ray_to_join()
    except UserError as error:
        return Finding("nodes", Level.FATAL, "no Ray that can be joined", "host:port", str(error))
    if running is None:
        return Finding("nodes", Level.OK, "a run stays on this machine")
    address = running.address
    if not os.environ.get("RAY_AUTH_TOKEN"):
        cost = "a Ray that asks for a token does not let the run in: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        return Finding("nodes", Level.NOTE, f"a run joins the Ray at {address}", "its token", cost)
    return Finding("nodes", Level.OK, f"a run joins the Ray at {address}")


def _shared_memory() -> Finding:
    place = Path("/dev/shm")
    if not place.is_dir():
        return Finding("/dev/shm", Level.NOTE, "none", "", "Ray's object store falls back to a slow disk")
    free = shutil.disk_usage(place).free / GIB
    small = "Ray's object store falls back to a slow disk; in a container give --shm-size" if free < 1 else ""
    return Finding("/dev/shm", Level.NOTE if small else Level.OK, f"{free:.1f} GiB free", "1 GiB or more", small)


def _memory() -> Finding:
    free = psutil.virtual_memory().available / GIB
    low = "a server and a rank of the smallest model need about 4 GiB" if free < 4 else ""
    return Finding("memory", Level.NOTE if low else Level.OK, f"{free:.1f} GiB available", "4 GiB or more", low)


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free / GIB
    low = "checkpoints hold the weights and twice as much for Adam" if free < 5 else ""
    return Finding("disk here", Level.NOTE if low else Level.OK, f"{free:.1f} GiB free", "5 GiB or more", low)


def doctor() -> None:
    """Say what this machine has, against the pinned versions, and what each missing part costs.

    Exits non-zero only where megarl cannot run.
    """
    diagnosis = diagnose()
    Console().print(render(diagnosis))
    raise typer.Exit(0 if diagnosis.can_run else 1)
