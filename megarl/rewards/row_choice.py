"""Which grader grades which rows, by the rows' fields; and that every row, and every grader, has some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from operator import attrgetter
from typing import Any

from megarl.core.errors import UserError
from megarl.core.types import Prompt
from megarl.core.words import some
from megarl.data.rows import field_of
from megarl.recipe.reward import Reward

Only = Mapping[str, Sequence[str | int | float | bool]]  # values of a field, by its name

ID = attrgetter("id")


def grades_row(only: Only, fields: Mapping[str, Any]) -> bool:
    """Whether all of these fields of a row have one of the values."""
    return all(_among(field_of(fields, name), values) for name, values in only.items())


def check_choice(
    reward: Reward,
    prompts: Sequence[Prompt],
    *,
    alone: Sequence[Prompt],
    part: bool = False,
    place: Callable[[Prompt], str] = ID,
) -> None:
    """Raises UserError for a grader that grades none of the rows, and a row that nothing rewards.

    alone: those of them that graders alone reward: no environment does, nor a reward model. part: these are not all rows of the
    run, and a grader may be for others. place: where a row stands, for messages.
    """
    graders = reward.by_name()
    chosen = {name: settings.only for name, settings in graders.items() if settings.only}
    if not chosen:
        return
    for name, only in () if part else chosen.items():
        if not any(grades_row(only, prompt.metadata) for prompt in prompts):
            raise UserError(
                f"`reward.graders.{name}.only`: no row is so: {_nearest(only, prompts)} Correct or remove it."
            )
    counting = [settings.only for settings in graders.values() if settings.weight != 0]
    for prompt in alone:
        if not any(grades_row(only, prompt.metadata) for only in counting):
            raise UserError(
                f"{place(prompt)}: no grader with a weight grades this row, and it would have no reward: "
                f"{_fields(chosen, prompt)}. Name its values in reward.graders.NAME.only, or leave the row out."
            )


def first_ungraded(reward: Reward, name: str, prompts: Sequence[Prompt]) -> Prompt | None:
    """The first of these rows that the grader of that name does not grade; None where there is none."""
    settings = reward.by_name().get(name)
    only = settings.only if settings is not None else {}
    return next((prompt for prompt in prompts if not grades_row(only, prompt.metadata)), None)


def _among(value: Any, values: Sequence[Any]) -> bool:
    """Whether it is one of them; true is not 1."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def _nearest(only: Only, prompts: Sequence[Prompt]) -> str:
    """What rows say in the fields that are asked for."""
    said = []
    for name, values in only.items():
        there = sorted({repr(field_of(prompt.metadata, name)) for prompt in prompts})
        wanted = list(map(repr, values))
        near = [close for each in wanted for close in get_close_matches(each, there, n=1) if close not in wanted]
        hint = f" (did you mean {near[0]}?)" if near else ""
        said.append(f"wanted is {' or '.join(wanted) or 'nothing'} in {name!r}, where they have {some(there, 5)}{hint}")
    return "; ".join(said) + "."


def _fields(chosen: Mapping[str, Only], prompt: Prompt) -> str:
    names = sorted({name for only in chosen.values() for name in only})
    return ", ".join(f"{name!r} is {field_of(prompt.metadata, name)!r}" for name in names)
