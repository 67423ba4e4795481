"""Why this machine makes no sandboxes, and what to set: out of what bubblewrap said, and what the kernel's settings are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

SHOWN = 400  # characters of what bubblewrap said

# A setting, when it forbids namespaces, and what to do.
SETTINGS: tuple[tuple[str, Callable[[str], bool], str], ...] = (
    (
        "user/max_user_namespaces",
        lambda value: value == "0",
        "it allows no user namespaces: `sysctl -w user.max_user_namespaces=15000`",
    ),
    (
        "kernel/unprivileged_userns_clone",
        lambda value: value == "0",
        "ordinary users may make no namespaces: `sysctl -w kernel.unprivileged_userns_clone=1`",
    ),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        lambda value: value == "1",
        "AppArmor takes away what a namespace gives: allow it for bwrap with a profile (`userns,`), or "
        "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`",
    ),
)
ELSEWHERE = (
    "none of the kernel's settings for namespaces forbids them. In a container its own rules do: start it with "
    "`--security-opt seccomp=unconfined --security-opt apparmor=unconfined` (Docker, Podman), or with a seccomp profile that "
    "allows `clone` and `unshare` with new namespaces, `mount` and `pivot_root` (Kubernetes)"
)


def explain(said: str, settings: Path = Path("/proc/sys")) -> str:
    """One paragraph. said: bubblewrap's words, or another error's. settings: where the kernel shows its own."""
    reasons = [f"{name.replace('/', '.')}={value}: {what}" for name, value, what in _forbidding(settings)]
    return (
        f"this machine makes no sandbox: {said.strip()[-SHOWN:] or 'bubblewrap ended without a word'}. "
        f"{'; '.join(reasons) or ELSEWHERE}. Code of a model is not run without one."
    )


def _forbidding(settings: Path) -> list[tuple[str, str, str]]:
    found = []
    for name, forbids, what in SETTINGS:
        try:
            value = (settings / name).read_text().strip()
        except OSError:
            continue  # this kernel has no such setting
        if forbids(value):
            found.append((name, value, what))
    return found
