"""SGLang servers in a recipe: how many the run starts (`rollout.servers`), or where those are that somebody else started.

And where a teacher is that somebody else serves (`teacher.servers`).
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Discriminator, Field, Tag

from megarl.recipe.section import (
    A_SECTION,
    A_VALUE,
    PositiveFloat,
    PositiveInt,
    Section,
    Variable,
    plain_url,
    value_or_section,
)


def _server_url(url: str) -> str:
    """As one that is compared: lower case, without a slash behind it, nor a port that goes without saying. Raises ValueError."""
    example = "http://10.0.0.7:30000"
    parts = urlsplit(plain_url(url, example))
    if parts.path:
        raise ValueError(f"wanted is where a server listens, such as {example}, without a path behind it")
    host = parts.hostname or ""
    shown = f"[{host}]" if ":" in host else host
    implied = parts.port in (None, 443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{shown}" + ("" if implied else f":{parts.port}")


def _different(urls: tuple[str, ...]) -> tuple[str, ...]:
    if not urls:
        raise ValueError("the list is empty: name a server, or remove the section")
    twice = [url for url, count in Counter(urls).items() if count > 1]
    if twice:
        raise ValueError(f"{', '.join(twice)} is named more than once: name each server once")
    return urls


Urls = Annotated[tuple[Annotated[str, AfterValidator(_server_url)], ...], AfterValidator(_different)]


class ExternalServers(Section):
    """SGLang servers that somebody else started, and that the run neither starts nor ends."""

    urls: Urls = Field(
        strict=False, description="where SGLang servers listen that somebody else started: docs/rollout.md"
    )
    key_env: Variable | None = Field(
        None,
        description="environment variable with their key (--api-key); default: no key, which is for servers at loopback and "
        "private addresses alone",
    )


class TeacherServers(Section):
    """SGLang servers of a teacher that somebody else started: they are asked, and sent nothing else."""

    urls: Urls = Field(
        strict=False,
        description="where SGLang servers of the teacher listen; a sequence goes to the one that has the fewest of them",
    )
    key_env: Variable | None = Field(
        None, description="environment variable with their key (--api-key); default: no key"
    )
    timeout_s: PositiveFloat = Field(
        600.0,
        description="deadline of one sequence, seconds, within which servers that are gone or busy are asked again; past it the "
        "sample has failed",
    )
    concurrency: PositiveInt = Field(
        64, description="most sequences of a collector in flight; others wait, outside of their deadline"
    )


Servers = Annotated[
    Annotated[PositiveInt, Tag(A_VALUE)] | Annotated[ExternalServers, Tag(A_SECTION)],
    Discriminator(value_or_section),
]
