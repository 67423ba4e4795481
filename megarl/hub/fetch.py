"""Gets the files of a repository into the hub's cache: those that are there already are not asked for again.

A lock keeps the processes of a machine, and of all machines that share a cache, from fetching the same thing at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.hub.names import Repo, hub_name, in_cache
from megarl.hub.problems import told

Say = Callable[[str], object]

MODEL = "model.path"  # the recipe's key, for errors
SILENT_S = 2.0  # that a process waits for another without saying so
CONFIG, CARD = "config.json", "README.md"
# Of a model: config, tokenizer and chat templates, which may be in a folder of theirs; then the weights. Other formats of the
# weights and folders of extras stay.
FLAT, TEMPLATES, WEIGHTS = ("*.json", "*.model", "*.txt", "*.tiktoken"), "*.jinja", "*.safetensors"
SMALL = (*FLAT, TEMPLATES)
NEVER = (*(f"*/{pattern}" for pattern in (*FLAT, WEIGHTS)), "consolidated*")


@dataclass(frozen=True)
class Snapshot:
    """A repository at one commit, in the cache. folder: of its files. repo: its revision is the commit's hash."""

    repo: Repo
    folder: Path


def resolve(repo: Repo, key: str) -> Repo:
    """The same at a commit: the hub's word, or the cache's where the hub is out of reach. Raises UserError."""
    from huggingface_hub import HfApi

    with told(key, repo):
        commit = HfApi().resolve_revision(repo.name, repo_type=repo.kind, revision=repo.revision).resolved
    return replace(repo, revision=commit)


def fetch_model(repo: Repo, key: str, check_config: Callable[[Path], object], say: Say) -> Snapshot:
    """The folder of a model: config and tokenizer first, and the weights once `check_config(folder)` takes these.

    repo: at a commit. Raises UserError.
    """
    check_config(fetch(repo, key, SMALL, say, ignore=NEVER).folder)
    return fetch(repo, key, (*SMALL, WEIGHTS), say, ignore=NEVER)


def fetch(
    repo: Repo, key: str, patterns: Sequence[str], say: Say, *, ignore: Sequence[str] = (), cache: Path | None = None
) -> Snapshot:
    """The repository's files that match, in the cache. say: told what is downloaded. Raises UserError.

    repo: at a commit. cache: the cache's root; default: the user's.
    """
    import httpx
    from huggingface_hub import constants, snapshot_download

    root = cache or Path(constants.HF_HUB_CACHE)
    which = {"allow_patterns": list(patterns), "ignore_patterns": list(ignore)}
    wanted: dict[str, Any] = {
        "repo_id": repo.name,
        "repo_type": repo.kind,
        "revision": repo.revision,
        "cache_dir": str(root),
        **which,
    }
    lock = root / ".locks" / f"megarl--{repo.kind}s--{repo.name.replace('/', '--')}.lock"
    with told(key, repo):
        lock.parent.mkdir(parents=True, exist_ok=True)
        with _alone(
            lock, lambda: say(f"{key}: waiting for another process that fetches {repo.name} (it holds {lock})")
        ):
            files = listing(repo, root)
            if files is not None:  # without it nobody knows what is missing
                if found := _from_cache(wanted):
                    return Snapshot(repo, found)
                say(f"{key}: downloading {repo.name}, {_megabytes(files, which):,.1f} MB, into {root}")
            try:
                return Snapshot(repo, Path(snapshot_download(**wanted)))
            except (OSError, httpx.TransportError):
                # A cache that another program has filled has no listing; what it holds is judged by who reads it.
                if listing(repo, root) is None and (found := _from_cache(wanted)):
                    return Snapshot(repo, found)
                raise


@contextmanager
def _alone(lock: Path, waits: Callable[[], object]) -> Iterator[None]:
    """One process at a time. waits: called where another one is in here, which may take as long as a download."""
    from filelock import Timeout
    from huggingface_hub.utils._fixes import WeakFileLock

    with ExitStack() as stack:
        try:
            stack.enter_context(WeakFileLock(lock, timeout=SILENT_S))
        except Timeout:
            waits()
            stack.enter_context(WeakFileLock(lock))
        yield


def _from_cache(wanted: dict[str, Any]) -> Path | None:
    """The folder of a snapshot that the cache holds whole, as far as it knows."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError):
        return Path(snapshot_download(**wanted, local_files_only=True))
    return None


def _megabytes(files: dict[str, int], which: dict[str, Any]) -> float:
    from huggingface_hub.utils._paths import filter_repo_objects

    return sum(files[name] for name in filter_repo_objects(files, **which)) / 1e6


def listing(repo: Repo, cache: Path | None = None) -> dict[str, int] | None:
    """The repository's files at its commit and their bytes, as the cache knows them; None where it does not."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        files = get_cached_repo_tree(repo.name, repo_type=repo.kind, revision=repo.revision, cache_dir=cache)
    except CachedRepoTreeNotFoundError:
        return None
    return {file.path: file.size for file in files}


def config_here(path: Path) -> Path | None:
    """A model's config.json in a folder, or in the hub's cache where the path is a name; None where neither has it."""
    from huggingface_hub import try_to_load_from_cache

    repo = hub_name(path, "model")
    if repo is None:
        return path / CONFIG if (path / CONFIG).exists() else None
    found = try_to_load_from_cache(repo.name, CONFIG, repo_type=repo.kind, revision=repo.revision)
    return Path(found) if isinstance(found, str) else None


def fetch_config(path: Path) -> Path:
    """Where a model's config.json is: downloaded, and nothing else of it, where the path is a name. Raises UserError."""
    repo = hub_name(path, "model")
    return path / CONFIG if repo is None else fetch(resolve(repo, MODEL), MODEL, [CONFIG], _quiet).folder / CONFIG


def find_tokenizer(path: Path) -> Path:
    """The folder of a model's config and tokenizer, without its weights where it is a name on the hub. Raises UserError."""
    repo = hub_name(path, "model")
    return path if repo is None else fetch(resolve(repo, MODEL), MODEL, SMALL, _quiet, ignore=NEVER).folder


def fetch_again(path: Path) -> str:
    """Get what a path in a cache of the hub is a copy of, on another machine; what was wrong, or nothing.

    The path is the same there: a cache on a shared file system holds it already, and any other is filled.
    """
    place = in_cache(path)
    if place is None:
        return ""
    model = place.repo.kind == "model"
    # Of a model the whole folder, or a file of it: then its config and tokenizer are wanted alone.
    patterns = (place.rest,) if not model else (*SMALL, WEIGHTS) if place.rest == "." else SMALL
    try:
        fetch(place.repo, "The hub's copy", patterns, _quiet, ignore=NEVER if model else (), cache=place.cache)
    except UserError as error:
        return str(error)
    return ""


def _quiet(line: str) -> None:
    """Nobody waits for this at a terminal, or it takes no time."""
