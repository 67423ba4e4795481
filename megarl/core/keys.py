"""Where keys of outside services stand. They are looked for, never read out, kept or logged."""

from __future__ import annotations

import configparser
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

WANDBS_OWN_SERVER = "https://api.wandb.ai"


def wandb_key_place() -> str | None:
    """Where wandb will find its key, for people; None where it has none and so writes offline. As wandb itself looks for it."""
    for variable in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if os.environ.get(variable):
            return variable
    server = os.environ.get("WANDB_BASE_URL") or _wandb_setting("base_url") or WANDBS_OWN_SERVER
    place = os.environ.get("NETRC") or "~/.netrc"
    try:
        stored = netrc.netrc(Path(place).expanduser()).authenticators(urlsplit(server).netloc)
    except (OSError, netrc.NetrcParseError):
        stored = None  # no such file, or one that wandb cannot read either
    if stored:
        return place
    return "wandb's settings" if _wandb_setting("api_key") else None


def _wandb_setting(name: str) -> str:
    """What `wandb login --host` and the like have written down: for this folder, else for this user; nothing where nothing is."""
    local = Path(".wandb" if Path(".wandb").exists() else "wandb")
    for folder in (local, Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()):
        settings = configparser.ConfigParser(interpolation=None)
        try:
            settings.read(folder / "settings", encoding="utf-8")
        except (OSError, ValueError, configparser.Error):
            continue  # wandb takes one that it cannot read for empty
        if found := settings.get("default", name, fallback=""):
            return found
    return ""
