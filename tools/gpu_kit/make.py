"""Packs the kit: wheels, the project as git has it, and a program that uses both."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
import time
import zipapp
import zipfile
from pathlib import Path

from tools.gpu_kit.parts import KitError, split
from tools.gpu_kit.wheels import chosen, download_words, read_lock

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "megarl",
    "tests",
    "tools",
    "recipes",
    "requirements",
    "launch",
    "docs",
    "bench",
    "pyproject.toml",
    "setup.py",
    "README.md",
)
FACTS = "kit.json"
PROGRAM = "gpu_kit"  # of the standard library alone, in one file


def make_kit(out: Path, python: str, torch: str, part_bytes: int) -> int:
    """Write parts and program into a folder, which must not hold an older kit. Raises KitError."""
    out.mkdir(parents=True, exist_ok=True)
    if older := sorted(out.glob("part-*")):
        raise KitError(f"{out} holds a kit already ({older[0].name}, ...): remove it, or name another folder by --out.")
    began = time.monotonic()
    pins = chosen(read_lock((ROOT / "requirements" / "cpu.lock").read_text()))
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as name:
        folder = Path(name)
        wheels = fetched(pins, python, folder / "wheels")
        facts = {"python": python, "torch": torch, "wheels": [wheel.name for wheel in wheels]}
        (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
        archive = folder / "kit.tar.xz"
        with tarfile.open(archive, "w:xz") as tar:
            tar.add(folder / FACTS, FACTS)
            for wheel in wheels:
                tar.add(loosened(wheel, folder), f"wheels/{wheel.name}")
            for file in project_files():
                tar.add(ROOT / file, f"project/{file}")
        parts = split(archive, out, part_bytes)
        write_program(out / PROGRAM, folder / "program")
    sizes = ", ".join(f"{part.name} {part.stat().st_size / 1e6:.1f} MB" for part in parts)
    print(f"{out}: {PROGRAM}, {sizes}; {len(pins)} wheels for Python {python}; {time.monotonic() - began:.0f} s")
    print(f"There, where Python {python} has torch {torch}: python {PROGRAM} use part-*")
    return 0


def fetched(pins: dict[str, str], python: str, folder: Path) -> list[Path]:
    """The wheels, from the index that pip knows. Raises KitError with what pip said."""
    command = [sys.executable, "-m", "pip", *download_words(pins, python, str(folder))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != len(pins):
        raise KitError(f"pip could not fetch {len(pins)} wheels for Python {python}: {done.stderr.strip()[-1500:]}")
    return wheels


def loosened(wheel: Path, folder: Path) -> Path:
    """The wheel with nothing compressed in it: the kit is, as a whole, and to two thirds of what its wheels are."""
    loose = folder / "loose.whl"
    with zipfile.ZipFile(wheel) as content, zipfile.ZipFile(loose, "w", zipfile.ZIP_STORED) as copy:
        for entry in content.infolist():
            copy.writestr(entry.filename, content.read(entry))
    return loose


def project_files() -> list[str]:
    """What git knows of the folders that the check needs, as it lies in the working tree."""
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True)
    return [file for file in listed.stdout.splitlines() if (ROOT / file).exists()]


def write_program(target: Path, folder: Path) -> None:
    """This package as one file that Python runs."""
    package = folder / "tools" / "gpu_kit"
    package.mkdir(parents=True)
    for file in Path(__file__).parent.glob("*.py"):
        (package / file.name).write_bytes(file.read_bytes())
    (folder / "__main__.py").write_text("import sys\n\nfrom tools.gpu_kit.__main__ import main\n\nsys.exit(main())\n")
    zipapp.create_archive(folder, target)
