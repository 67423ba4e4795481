"""Which of several environments a row is for; and that every row, and every environment, has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megarl.core.errors import UserError
from megarl.core.types import Prompt
from megarl.core.words import did_you_mean, some
from megarl.data.rows import field_of
from megarl.recipe.agent import Agent
from megarl.rewards.row_choice import ID

MOST_SHOWN = 5  # values of rows in a message


def kind_of(key: str, row: Prompt) -> Any:
    """What the row has in that field, dots into objects; None where it has none."""
    return field_of(row.metadata, key)


def check_kinds(
    agent: Agent,
    rows: Sequence[Prompt],
    *,
    played: Sequence[Prompt],
    part: bool = False,
    place: Callable[[Prompt], str] = ID,
) -> None:
    """Raises UserError for a row that names no environment, and an environment that no row names.

    played: those of the rows that episodes are about. part: these are not all rows of the run, and an environment may be for
    others. place: where a row stands, for messages.
    """
    key, names = agent.environment_key, list(agent.environments)
    if key is None:
        return
    for row in played:
        kind = kind_of(key, row)
        if not isinstance(kind, str) or kind not in agent.environments:
            hint = did_you_mean(kind, names, quoted=True)
            raise UserError(
                f"{place(row)}: no environment is for this row: {key!r}, which agent.environment_key names, is {kind!r}, and in "
                f"agent.environments are {', '.join(names)}.{hint} Name one in the row, add it "
                "there, correct agent.environment_key, or leave the row out."
            )
    there = sorted({str(kind_of(key, row)) for row in rows})
    for name in () if part else names:
        if name not in there:
            raise UserError(
                f"`agent.environments.{name}`: no row is for it: in {key!r}, which agent.environment_key names, they have "
                f"{some(there, MOST_SHOWN)}. Correct the name, or remove it."
            )
