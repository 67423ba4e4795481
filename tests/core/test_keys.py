"""Where keys stand: wherever wandb itself would find them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.core.keys import wandb_key_place

OURS = "machine wandb.ours:8443 login user password secret-key\n"
LOGIN = "[default]\nbase_url = https://wandb.ours:8443\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("API_KEY", "IDENTITY_TOKEN_FILE", "BASE_URL", "CONFIG_DIR"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_key_of_a_server_of_ones_own_is_found_after_a_login_there(home: Path) -> None:
    """`wandb login --host=https://wandb.ours:8443` writes both files; a run wrote offline then, and nobody said so."""
    write(home / ".netrc", OURS)
    assert wandb_key_place() is None
    write(home / ".config" / "wandb" / "settings", LOGIN)
    assert wandb_key_place() == "~/.netrc"
    write(
        home / "work" / "wandb" / "settings", "[default]\nbase_url = https://api.wandb.ai\n"
    )  # this folder's comes first
    assert wandb_key_place() is None
    write(home / "work" / "wandb" / "settings", "no settings")
    assert wandb_key_place() == "~/.netrc"


def test_the_places_that_variables_name_are_looked_at(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / "keys", OURS)
    write(home / "config" / "settings", LOGIN)
    monkeypatch.setenv("NETRC", str(home / "keys"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(home / "config"))
    assert wandb_key_place() == str(home / "keys")
    monkeypatch.setenv("WANDB_BASE_URL", "https://another")
    assert wandb_key_place() is None
    monkeypatch.setenv("WANDB_IDENTITY_TOKEN_FILE", "/token")
    assert wandb_key_place() == "WANDB_IDENTITY_TOKEN_FILE"


def test_a_key_among_settings_is_one(home: Path) -> None:
    write(home / ".config" / "wandb" / "settings", "[default]\napi_key = secret%key\n")
    assert wandb_key_place() == "wandb's settings"
