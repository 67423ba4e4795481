"""What the recipe's sections are made of: the base class, and the types of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Recompute = Literal["none", "selective", "full"]


def _expand_home(path: Path) -> Path:
    """`~/x` as a shell would have it: shells do not expand it after the `=` of an override."""
    return path.expanduser() if path.parts[:1] == ("~",) else path


UserPath = Annotated[Path, AfterValidator(_expand_home)]


class Section(BaseModel):
    """Base of every section: strict types, frozen, no unknown keys."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
