"""What the recipe's sections are made of: the base class, and the types of their values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
# What several sections have says here what it is, and each what holds by default.
Recompute = Annotated[
    Literal["none", "selective", "full"],
    Field(description="activations computed again in backward: none, selective (attention), full (whole layers)"),
]
RecomputeNumLayers = Annotated[
    PositiveInt | None,
    Field(
        description="with recompute full: so many layers of each (virtual) pipeline stage, and no others; default: all"
    ),
]
AuxLossCoef = Annotated[
    float,
    Field(
        ge=0,
        description="weight of the load-balancing loss of a mixture of experts: one of each micro-batch, their mean by tokens, "
        "padding counted; so micro_batch_tokens changes it, and a little the layout",
    ),
]
Part = Literal["grads", "params", "optimizer"]
Offload = Annotated[
    tuple[Part, ...],
    Field(strict=False, description="what leaves the device while nothing needs it: grads, params, optimizer"),
]
FrozenOffload = Annotated[
    tuple[Literal["params"], ...],
    Field(strict=False, description="params: they leave the device while nothing needs them"),
]
SaveEvery = Annotated[PositiveInt | None, Field(description="steps between checkpoints; default: only at the end")]
KeepLast = Annotated[PositiveInt, Field(description="newest checkpoints kept")]
KeepEvery = Annotated[PositiveInt | None, Field(description="also keep those of every so many steps, for good")]
AsyncSave = Annotated[
    bool, Field(description="write checkpoints while training goes on; each is committed one step later")
]
# How long a run is: one of the two. Epochs are steps once the rows are counted (run/epochs).
Steps = Annotated[int, Field(ge=0)]
Epochs = Annotated[
    PositiveFloat | None,
    Field(description="times through the rows, in the place of train.steps: as many steps as are whole in them"),
]


def _expand_home(path: Path) -> Path:
    """`~/x` as a shell would have it: shells do not expand it after the `=` of an override."""
    return path.expanduser() if path.parts[:1] == ("~",) else path


UserPath = Annotated[Path, AfterValidator(_expand_home)]


KEY_ENV = "Put the key into an environment variable and name it in key_env"


def plain_url(url: str, example: str = "http://host:8000/grade", remedy: str = KEY_ENV) -> str:
    """An address without secrets. remedy: for one with some. Raises ValueError without repeating it: it may hold a password."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:  # a port that is no number, or a host that nobody can look up
        known = False
    if not known or any(character.isspace() for character in url):
        raise ValueError(f"wanted is an address such as {example}, or one with https")
    if parts.username is not None or parts.password is not None or "?" in url or "#" in url:
        raise ValueError(
            f"an address with a user, a password, `?` or `#` is refused: recipes are saved and shown. {remedy}"
        )
    return url.rstrip("/")


def _variable(name: str) -> str:
    """Raises ValueError without repeating the name: it may be the key itself."""
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        raise ValueError(
            "wanted is the name of the environment variable that holds the key, in capitals, such as JUDGE_API_KEY; "
            "the key itself belongs in no recipe"
        )
    return name


Variable = Annotated[str, AfterValidator(_variable)]

# Of a key that takes a value or a section: how pydantic's errors name the two. No key of a recipe has a space.
A_VALUE, A_SECTION = "a value", "a section"


def value_or_section(given: object) -> str:
    """Which of the two was meant, so that only its own complaints are heard."""
    return A_SECTION if isinstance(given, (dict, BaseModel)) else A_VALUE


class Section(BaseModel):
    """Base of every section: strict types, frozen, no unknown keys."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _none_of_them(cls, given: Any) -> Any:
        """Where users choose the names, null takes back what a file has under one, or all: an empty section would change nothing.

        Not of keyword arguments, where null is a value as good as any other.
        """
        if not isinstance(given, dict):
            return given
        named = {name: field.annotation for name, field in cls.model_fields.items() if field.default == {}}
        return {
            name: _without_nulls(value) if name in named and get_args(named[name])[1:] != (Any,) else value
            for name, value in given.items()
            if value is not None or name not in named
        }


def _without_nulls(value: Any) -> Any:
    """What is left of a section of names; what is none is as it was, for the schema to refuse."""
    return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value
