"""The paths of a recipe that are names: each becomes the folder or the file that it stands for.

What the run writes down keeps the names, with the commit that they stood for: a run that goes on, or that is made again,
reads the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.core.json_file import read_object
from megarl.hub.fetch import CARD, NEVER, SMALL, Say, fetch, fetch_model, listing, resolve
from megarl.hub.names import Kind, Repo, hub_name
from megarl.hub.splits import split_pattern
from megarl.recipe.dataset import is_set
from megarl.recipe.load import Loaded, with_path
from megarl.recipe.reward import Classify
from megarl.recipe.save import PROVENANCE_FILE
from megarl.recipe.schema import Recipe, RecipeT

TRAIN, EVAL = "data.train", "data.eval"
MODELS = ("model.path", "critic.path", "reward_model.path", "teacher.path")


def names_of(recipe: Any, skip: Sequence[str] = ()) -> dict[str, Repo]:
    """The repositories of the hub that a recipe names, by key. skip: keys that are not asked for."""
    models = (*MODELS, *_tokenizers(recipe))
    kinds: dict[str, Kind] = {**dict.fromkeys(models, "model"), TRAIN: "dataset", EVAL: "dataset"}
    found = {}
    for key, kind in kinds.items():
        path = _get(recipe, key)
        if path is None or key in skip or (kind == "dataset" and not is_set(path)):
            continue
        if repo := hub_name(path, kind):
            found[key] = repo
    return found


def localize(
    loaded: Loaded[RecipeT],
    check_config: Callable[[Path], object],
    say: Say,
    *,
    run: Path | None = None,
    skip: Sequence[str] = (),
) -> Loaded[RecipeT]:
    """The recipe with folders and files in the place of names. Raises UserError.

    check_config: refuses a model's folder that has only config and tokenizer yet. say: told what was found and what is
    downloaded. run: folder of the run that goes on, whose commits count. skip: keys that are not asked for.
    """
    recipe: Any = loaded.recipe
    taken = _taken(run) if run is not None else {}
    names: dict[str, str] = {}
    commits: dict[str, dict[str, str | None]] = {}
    repos: dict[str, Repo] = names_of(recipe, skip)
    # Small ones first: what is wrong with rows is known before weights are fetched.
    models: list[str] = [each for each in (*_tokenizers(recipe), *MODELS) if each in repos]
    for key in (*(each for each in (TRAIN, EVAL) if each not in skip), *models):
        repo = repos.get(key)
        at = None if repo is None else _pinned(repo, taken.get(key)) or resolve(repo, key)
        if repo is not None and at is not None:
            commits[key] = {"name": repo.name, "revision": repo.revision, "commit": at.revision}
            say(f"{key}: {repo.name}, commit {at.revision}, of the hub")
        if key in MODELS:
            assert at is not None
            found: Path | None = fetch_model(at, key, check_config, say).folder
        elif key in models:
            assert at is not None
            found = fetch(at, key, SMALL, say, ignore=NEVER).folder
        else:
            found = _rows(loaded.recipe, key, at, say)
        if found is not None:
            names[key] = str(at or _get(recipe, key))
            recipe = with_path(recipe, key, found)
    return replace(loaded, names=names, commits=commits).with_recipe(recipe) if names else loaded


def local_model(path: Path, key: str, check_config: Callable[[Path], object], say: Say) -> Path:
    """The folder of a model that is given outside of a recipe; a path that is no name stays. Raises UserError."""
    repo = hub_name(path, "model")
    return path if repo is None else fetch_model(resolve(repo, key), key, check_config, say).folder


def _rows(recipe: Any, key: str, repo: Repo | None, say: Say) -> Path | None:
    """The file or pattern of a split; None where the recipe names a file."""
    path: Path | None = _get(recipe, key)
    if repo is None and (path is None or not path.is_dir()):
        return None
    config, split = _config_and_split(recipe.data, key)
    about = f"{key} is {repo or path}"
    if repo is None:
        assert path is not None
        files = sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())
        return path / split_pattern(files, _card(path), config, split, about)
    folder = fetch(repo, key, [CARD], say).folder
    pattern = split_pattern(sorted(listing(repo) or {}), _card(folder), config, split, about)
    return fetch(repo, key, [pattern], say).folder / pattern


def _card(folder: Path) -> str:
    path = folder / CARD
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _config_and_split(data: Any, key: str) -> tuple[str | None, str]:
    if key == TRAIN:
        return data.config, data.train_split
    same = _name(data.train) == _name(data.eval)
    return data.eval_config or (data.config if same else None), data.eval_split


def _name(path: Path) -> str:
    return str(path).partition("@")[0]


def _taken(run: Path) -> Mapping[str, Any]:
    """What a run has taken from the hub, by key; nothing where it says nothing."""
    path = run / PROVENANCE_FILE
    taken = read_object(path, "Begin a new run under another run.name.").get("hub") if path.exists() else None
    return taken if isinstance(taken, dict) else {}


def _pinned(repo: Repo, taken: Any) -> Repo | None:
    """The repository at the commit that a run began with, where it named the same.

    A run that was submitted was told the commit: a recipe that says nothing of one still names the same.
    """
    if not isinstance(taken, dict) or taken.get("name") != repo.name:
        return None
    same = repo.revision is None or taken.get("revision") == repo.revision
    return replace(repo, revision=taken["commit"]) if same else None


def _tokenizers(recipe: Any) -> list[str]:
    """The keys of reward models behind an address, of which the run has the tokenizer alone."""
    graders = recipe.reward.graders if isinstance(recipe, Recipe) else {}
    return [f"reward.graders.{name}.tokenizer" for name, each in graders.items() if isinstance(each, Classify)]


def _get(section: Any, key: str) -> Any:
    for name in key.split("."):
        section = section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)
    return section
