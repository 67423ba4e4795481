"""Uses the kit on a machine that has Python and torch: unpacks it, puts it on the path, and runs the check or another module."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.gpu_kit.parts import KitError, join

FACTS, SITE, PROJECT = "kit.json", "site", "project"
# What the machine's own torch consists of: whatever a wheel says, none of it may stand before it.
OF_TORCH = ("torch", "triton", "nvidia", "functorch", "torchgen")
OURS = ("tests", "tools", "bench")  # folders that Python takes as packages
DATA = (".data/purelib/", ".data/platlib/")  # of a wheel: belongs beside its packages


@dataclass(frozen=True)
class Check:
    """tools/gpu_check, in so many minutes from now on."""

    platform: str
    minutes: float
    go_on: bool = False

    def words(self, took_s: float, out: Path) -> list[str]:
        """Of the command line. took_s: what has gone by."""
        left = max(0.1, self.minutes - took_s / 60)
        words = ["tools.gpu_check", "--platform", self.platform, "--minutes", f"{left:.2f}", "--out", str(out)]
        return [*words, *["--go-on"] * self.go_on]


@dataclass(frozen=True)
class Module:
    """Another module of the project, with its arguments."""

    given: tuple[str, ...]

    def words(self, took_s: float, out: Path) -> list[str]:
        """As they were given."""
        return list(self.given)


def use_kit(given: Sequence[Path], what: Check | Module, into: Path | None, out: Path) -> int:
    """Unpack and run it in the folder `out`; its exit code. Results go to `out` as they come. Raises KitError.

    into: what was unpacked stays there; where it is not given nothing stays.
    """
    if into is not None:
        return _use(given, what, into.absolute(), out.absolute())
    with tempfile.TemporaryDirectory(prefix="megarl-kit-", ignore_cleanup_errors=True) as folder:
        return _use(given, what, Path(folder), out.absolute())


def _use(given: Sequence[Path], what: Check | Module, folder: Path, out: Path) -> int:
    began = time.time()
    torch = torch_version()
    facts = unpack(given, folder)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if facts["python"] != here:
        raise KitError(f"The kit is for Python {facts['python']}, and this is {here}: make one with --python {here}.")
    if not torch.startswith(facts["torch"]):
        print(
            f"gpu_kit: the kit was made for torch {facts['torch']}, and torch {torch} is here. It is tried all the same."
        )
    took = time.time() - began
    print(f"gpu_kit: unpacked into {folder} in {took:.0f} s; torch {torch}; results in {out}", flush=True)
    path = os.pathsep.join(str(folder / name) for name in (SITE, PROJECT))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "", "HF_HUB_OFFLINE": "1"}
    # In the folder of results, so that what a module is told to write stays.
    out.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", *what.words(took, out)], cwd=out, env=environment, check=False
    ).returncode


def torch_version() -> str:
    """Of the machine's own torch. Raises KitError where there is none."""
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise KitError(f"{sys.executable} has no torch that loads ({last[0]}), and the kit carries none.")
    return done.stdout.strip().splitlines()[-1]


def unpack(given: Sequence[Path], folder: Path) -> dict[str, str]:
    """What the kit says of itself. A folder that this kit was unpacked into before is taken as it is. Raises KitError."""
    folder.mkdir(parents=True, exist_ok=True)
    archive, done = folder / "kit.tar", folder / "unpacked"
    kit = join(given, archive)
    if importlib.util.find_spec("_lzma") is None:
        raise KitError(f"{sys.executable} was built without lzma, by which the kit is compressed: name another Python.")
    if not (done.exists() and done.read_text() == kit):
        for name in (SITE, PROJECT, "wheels"):
            shutil.rmtree(folder / name, ignore_errors=True)
        with tarfile.open(archive) as tar:
            # Python before 3.11.4 has no filters; what the archive holds its checksum has vouched for.
            tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # type: ignore[arg-type]
        for wheel in sorted((folder / "wheels").glob("*.whl")):
            install(wheel, folder / SITE)
        for name in OURS:
            # A package of this name among the machine's own would stand before a folder that is none.
            (folder / PROJECT / name).mkdir(parents=True, exist_ok=True)
            (folder / PROJECT / name / "__init__.py").touch()
        done.write_text(kit)
    archive.unlink()
    facts: dict[str, str] = json.loads((folder / FACTS).read_text())
    return facts


def install(wheel: Path, site: Path) -> None:
    """Unpack one wheel; its scripts are left out. Raises KitError for one that would stand before the machine's torch."""
    with zipfile.ZipFile(wheel) as content:
        for entry in content.infolist():
            name = place_of(entry.filename)
            if name is None or entry.is_dir():
                continue
            if name.partition("/")[0] in OF_TORCH:
                raise KitError(f"{wheel.name} holds {name}, which would stand before the machine's own torch.")
            target = site / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with content.open(entry) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file)


def place_of(name: str) -> str | None:
    """Where a wheel's file belongs, from the folder of packages on; None where it belongs elsewhere (scripts, headers)."""
    for marker in DATA:
        if marker in name:
            return name.partition(marker)[2]
    return None if ".data/" in name.partition("/")[0] + "/" else name
