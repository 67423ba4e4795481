"""Which versions megarl is pinned to and which are installed, told without importing any of them."""

from __future__ import annotations

import hashlib
import re
from importlib import metadata
from pathlib import Path

_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*==\s*([^;,\s]+)")


def pins() -> dict[str, str]:
    """Distribution name to the version that this megarl was tested with; from the package's own metadata."""
    try:
        requirements = metadata.requires("megarl") or []
    except metadata.PackageNotFoundError:
        return {}  # run from a folder, without an installation
    matches = [_PIN.match(requirement) for requirement in requirements]
    return {match[1]: match[2] for match in matches if match}


def installed(distribution: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def matches(found: str, pin: str) -> bool:
    """Whether a version is the pinned one; a local part such as `+cpu` says how it was built and does not count."""
    return found.partition("+")[0] == pin.partition("+")[0]


def code_digest() -> str:
    """Twelve hex digits that differ where megarl's own source does."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
