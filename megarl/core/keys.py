"""Where keys of outside services stand. They are looked for, never read out, kept or logged."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit


def wandb_key_place() -> str | None:
    """Where wandb will find its key, for people; None where it has none and so writes offline."""
    if os.environ.get("WANDB_API_KEY"):
        return "WANDB_API_KEY"
    server = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        stored = netrc.netrc(Path.home() / ".netrc").authenticators(server)
    except (OSError, netrc.NetrcParseError):
        stored = None  # no such file, or one that wandb cannot read either
    return "~/.netrc" if stored else None
