from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from megarl.core.errors import UserError
from megarl.hub.fetch import Snapshot, config_here, fetch, fetch_again, fetch_config, fetch_model, resolve
from megarl.hub.names import Repo, hub_name, in_cache
from tests.hub.conftest import MODEL
from tests.support.stand_in_hub import StandInHub, ask_stand_in, environment

WANTED = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


def get(name: str, check: object = None) -> Snapshot:
    repo = hub_name(Path(name), "model")
    assert repo
    return fetch_model(resolve(repo, "model.path"), "model.path", check or (lambda folder: None), lambda line: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "name", "revision"),
    [
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B", None),
        ("openai/gsm8k@refs/convert/parquet", "openai/gsm8k", "refs/convert/parquet"),
        ("a/b@v1.0", "a/b", "v1.0"),
        *(
            (path, None, None)
            for path in ("gpt2", "../a/b", "/a/b", "a/b/c", ".cache/model", "a/b--c", "a/b@", "here/it")
        ),
    ],
)
def test_which_paths_are_names(
    path: str, name: str | None, revision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "it").mkdir(parents=True)
    assert hub_name(Path(path), "model") == (Repo("model", name, revision) if name else None)


def test_only_what_is_needed_is_downloaded_and_only_once(hub: StandInHub) -> None:
    commit = hub.branches["model", MODEL]["main"]
    folder = get(MODEL).folder
    assert hub.downloads() == sorted([*WANTED, "model.safetensors"])
    assert sorted(path.name for path in folder.iterdir()) == hub.downloads()
    asked = len(hub.asked)
    assert get(MODEL).folder == folder
    assert len(hub.asked) == asked + 1  # which commit the main branch is now
    assert get(f"{MODEL}@{commit}").folder == folder
    assert len(hub.asked) == asked + 1


def test_who_waits_for_another_download_says_so(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.hub.fetch.SILENT_S", 0.02)
    told: list[str] = []
    repo = Repo("model", MODEL, hub.branches["model", MODEL]["main"])
    path = tmp_path / ".locks" / "megarl--models--own--tiny.lock"
    path.parent.mkdir()
    with FileLock(path) as lock:

        def say(line: str) -> None:
            told.append(line)
            lock.release()

        timer = threading.Timer(3.0, lock.release)  # else a process that says nothing waits for ever
        timer.start()
        found = fetch(repo, "model.path", ["config.json"], say, cache=tmp_path)
        timer.cancel()
    assert told[0] == f"model.path: waiting for another process that fetches {MODEL} (it holds {path})"
    assert (found.folder / "config.json").is_file()


def test_chat_templates_come_out_of_their_folder_and_nothing_else_out_of_any(hub: StandInHub, tiny: Path) -> None:
    extras = {f"original/{name}": b"x" for name in ("params.json", "tokenizer.model", "a.txt", "b.safetensors")}
    template = "additional_chat_templates/tool_use.jinja"
    hub.put_folder("model", MODEL, tiny, **extras, **{template: b"x"})
    folder = get(MODEL).folder
    assert hub.downloads() == sorted([*WANTED, "model.safetensors", "tool_use.jinja"])
    assert (folder / template).read_bytes() == b"x"


def test_weights_are_not_fetched_for_a_config_that_is_refused(hub: StandInHub) -> None:
    def refuse(folder: Path) -> None:
        assert (folder / "config.json").exists()
        raise UserError("not this one")

    with pytest.raises(UserError, match="not this one"):
        get(MODEL, refuse)
    assert hub.downloads() == WANTED
    assert config_here(Path(MODEL)) == config_here(Path(f"{MODEL}@main")) == fetch_config(Path(MODEL))
    assert hub.downloads() == WANTED


def test_without_a_network_the_cache_counts_as_far_as_it_goes(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fetch_config(Path(MODEL))  # as a plan leaves it: without weights
    for url, home, offline, why in (
        (hub.url, "home", True, "HF_HUB_OFFLINE is set"),
        ("http://127.0.0.1:1", "empty", False, "http://127.0.0.1:1 does not answer"),
    ):
        ask_stand_in(monkeypatch, url, tmp_path / home, offline=offline)
        with pytest.raises(UserError) as caught:
            get(MODEL)
        said = str(caught.value)
        assert f"there is no {MODEL} here" in said and why in said and f"`hf download {MODEL}" in said
        assert str(tmp_path / home / "hub") in said
    ask_stand_in(monkeypatch, hub.url, tmp_path / "home", offline=True)
    assert config_here(Path(MODEL)) == fetch_config(Path(MODEL)) == config
    ask_stand_in(monkeypatch, hub.url, tmp_path / "home")
    folder = get(MODEL).folder
    ask_stand_in(monkeypatch, "http://127.0.0.1:1", tmp_path / "home")
    assert get(MODEL).folder == folder


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "models/tinny",
            ("there is no models/tinny here (there is models/tiny)", "HTTP 401", "if a name, correct that"),
        ),
        (f"{MODEL}@v9", ("no branch, tag or commit 'v9'",)),
        ("own/gated", ("gated", "/own/gated", "hf auth login")),
    ],
)
def test_what_the_hub_does_not_give_is_told(
    hub: StandInHub, tiny: Path, tmp_path: Path, name: str, said: tuple[str, ...]
) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    hub.put_folder("model", "own/gated", tiny)
    hub.gated.add("own/gated")
    with pytest.raises(UserError) as caught:
        get(name)
    assert str(caught.value).startswith(f"model.path is {name}")
    for words in said:
        assert words in str(caught.value)


def test_another_node_fills_a_cache_of_its_own_at_the_same_path(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = get(MODEL).folder
    place = in_cache(folder)
    assert place and (place.repo.name, place.cache, place.rest) == (MODEL, tmp_path / "home" / "hub", ".")
    (tmp_path / "home").rename(tmp_path / "home of the driver")
    ask_stand_in(monkeypatch, hub.url, tmp_path / "home of this user")  # wherever this node's own would be
    assert fetch_again(folder) == ""
    assert (folder / "model.safetensors").exists()
    shutil.rmtree(tmp_path / "home")
    assert fetch_again(folder / "config.json") == ""  # of a model whose tokenizer alone is wanted
    assert (folder / "tokenizer.json").exists() and not (folder / "model.safetensors").exists()
    shutil.rmtree(tmp_path / "home")
    ask_stand_in(monkeypatch, hub.url, tmp_path / "home of this user", offline=True)
    assert "HF_HUB_OFFLINE is set" in fetch_again(folder)
    assert fetch_again(tmp_path / "some folder") == ""


def test_processes_at_once_download_once(hub: StandInHub, tmp_path: Path) -> None:
    code = f"""if True:
        from pathlib import Path
        from megarl.hub.recipe import local_model
        print(local_model(Path({MODEL!r}), "SRC", lambda folder: None, lambda line: None))"""
    env = os.environ | environment(hub.url, tmp_path / "home") | {"PYTHONPATH": str(Path(__file__).parents[2])}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    folders = {process.communicate(timeout=60)[0] for process in running}
    assert len(folders) == 1 and all(process.returncode == 0 for process in running)
    assert hub.downloads() == sorted([*WANTED, "model.safetensors"])
