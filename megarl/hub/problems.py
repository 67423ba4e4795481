"""What can go wrong between a name and its files, as one paragraph each: what was looked for, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.core.errors import UserError
from megarl.core.words import nearest_beside
from megarl.hub.names import Repo

LOGIN = "`hf auth login`, or HF_TOKEN in the environment"
REASON_CHARACTERS = 300  # of what the library says


@contextmanager
def told(key: str, repo: Repo) -> Iterator[None]:
    """Turns the errors of huggingface_hub into UserErrors. key: of the recipe, or what else the name was given as."""
    import httpx
    from huggingface_hub import errors

    # The first that fits counts: most of these classes are derived from those below them.
    says: dict[type[Exception], Callable[[Repo, Exception], str]] = {
        errors.GatedRepoError: _gated,
        errors.RepositoryNotFoundError: _not_found,
        errors.RevisionNotFoundError: _no_revision,
        errors.RevisionResolutionError: _unreachable,
        errors.LocalEntryNotFoundError: _unreachable,
        errors.OfflineModeIsEnabled: _unreachable,
        httpx.TransportError: _unreachable,
        errors.HfHubHTTPError: _refused,
        errors.HFValidationError: _no_name,
        OSError: _disk,
    }
    try:
        yield
    except tuple(says) as error:
        say = next(says[kind] for kind in says if isinstance(error, kind))
        raise UserError(f"{key} is {repo}: {say(repo, error)}") from error


def _gated(repo: Repo, error: Exception) -> str:
    from huggingface_hub import constants

    return (
        f"the {repo.noun} is gated, and its owner has not let this account in. Ask for access at "
        f"{constants.ENDPOINT}/{repo.page}, then log in here as the same account: {LOGIN}."
    )


def _not_found(repo: Repo, error: Exception) -> str:
    return (
        f"{here(Path(repo.name))}, and the hub shows no {repo.noun} of that name ({_status(error)}). If a path is meant, "
        f"correct it; if a name, correct that; if the {repo.noun} is private, log in: {LOGIN}."
    )


def _no_revision(repo: Repo, error: Exception) -> str:
    return (
        f"the hub has the {repo.noun} {repo.name}, and it has no branch, tag or commit {repo.revision or 'main'!r}. Correct "
        "what stands behind the `@`, or leave it out for the main branch."
    )


def _unreachable(repo: Repo, error: Exception) -> str:
    from huggingface_hub import constants

    offline = constants.is_offline_mode()
    why = (
        "HF_HUB_OFFLINE is set"
        if offline
        else f"{constants.ENDPOINT} does not answer: {_reason(error.__cause__ or error)}"
    )
    kind = " --repo-type dataset" if repo.kind == "dataset" else ""
    revision = f" --revision {repo.revision}" if repo.revision else ""
    return (
        f"{here(Path(repo.name))}; the cache {constants.HF_HUB_CACHE} does not hold all of it; and nothing can be "
        f"downloaded ({why}). If a path is meant, correct it. If a name, fetch it where there is a network, by `hf download "
        f"{repo.name}{kind}{revision}`, into a cache that this machine sees (HF_HOME)."
    )


def _refused(repo: Repo, error: Exception) -> str:
    if _status(error) in ("HTTP 401", "HTTP 404"):
        return _not_found(repo, error)  # the hub does not tell strangers whether there is a private one
    return f"the hub refuses it ({_status(error)}: {_reason(error)}). Try again later, or log in: {LOGIN}."


def _no_name(repo: Repo, error: Exception) -> str:
    return f"{here(Path(repo.name))}, and it is no name on the hub either: {_reason(error)}. Correct it."


def _disk(repo: Repo, error: Exception) -> str:
    from huggingface_hub import constants

    return (
        f"it cannot be written into the cache {constants.HF_HUB_CACHE} ({_reason(error)}). Make room or set HF_HOME to "
        "another folder; what has been downloaded is kept."
    )


def here(path: Path) -> str:
    """That a path leads nowhere here, with the nearest name that does."""
    near = nearest_beside(path)
    return f"there is no {path} here" + (f" (there is {near})" if near else "")


def _status(error: Exception) -> str:
    response = getattr(error, "response", None)
    return "no answer" if response is None else f"HTTP {response.status_code}"


def _reason(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:REASON_CHARACTERS].rstrip(".")
