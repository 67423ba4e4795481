"""What can be refused of a recipe's graders before anything starts: functions, keys, templates, sandboxes. It asks no server."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarl.core.errors import UserError
from megarl.core.types import Prompt
from megarl.data.prompts import MESSAGES_KEY
from megarl.recipe.reward import Classify, Code, Judge, Reward, Rule
from megarl.rewards.classify import QUESTION, check_template, open_tokenizer
from megarl.rewards.code import check_sandbox
from megarl.rewards.question import compile_template
from megarl.rewards.resolve import BUILT_IN, resolve_reward
from megarl.rewards.row_choice import grades_row


def check_graders(reward: Reward) -> None:
    """Raises UserError for the first grader that cannot work, with its key."""
    for name, settings in reward.by_name().items():
        key = reward.key_of(name)
        if isinstance(settings, Rule):
            resolve_reward(settings.fn, key=f"{key}.fn")
            continue
        if isinstance(settings, Code):
            check_sandbox(settings, key)
            continue
        read_key(settings.key_env, key)
        if isinstance(settings, Judge):
            compile_template(settings.template, f"{key}.template")
        if isinstance(settings, Classify):
            at = f"{key}.tokenizer"
            check_template(open_tokenizer(settings.tokenizer, at), at, {"a question of the user": [QUESTION]})


def check_rendered(reward: Reward, prompts: Sequence[Prompt], place: Callable[[Prompt], str]) -> None:
    """Whether reward models' templates render the rows that they grade: one of each order of roles is tried. Raises UserError.

    place: where a row stands, for messages.
    """
    for name, settings in reward.by_name().items():
        if isinstance(settings, Classify):
            graded = (row for row in reversed(prompts) if grades_row(settings.only, row.metadata))
            by_roles = {tuple(said["role"] for said in row.metadata[MESSAGES_KEY]): row for row in graded}
            at = f"{reward.key_of(name)}.tokenizer"
            messages = {place(row): row.metadata[MESSAGES_KEY] for row in by_roles.values()}
            check_template(open_tokenizer(settings.tokenizer, at), at, messages)


def taken_back_notes(reward: Reward, sources: Mapping[str, str]) -> tuple[str, ...]:
    """A line where null has taken the last grader back, and the default grades in its place. sources: `Loaded.sources`."""
    nulls = [f"{key} ({where})" for key, where in sources.items() if f"{key}.".startswith("reward.graders.")]
    if reward.graders or reward.fn is None or "reward.fn" in sources or not nulls:
        return ()
    return (
        f"{', '.join(nulls)}: null takes the last grader back, and the default grades in its place: reward.fn {reward.fn}. "
        "Set reward.fn to have it otherwise",
    )


def compares_answers(reward: Reward, fields: Mapping[str, Any]) -> list[str]:
    """Names of the built-in rules among the graders of a row with these fields: they compare with its answer."""
    return [
        each.fn
        for each in reward.by_name().values()
        if isinstance(each, Rule) and each.fn in BUILT_IN and grades_row(each.only, fields)
    ]


def read_key(variable: str | None, key: str) -> str | None:
    """The secret in an environment variable, white space around it left out; None where no variable is named.

    key: where the grader stands in the recipe. Raises UserError: not set, empty, or no single word.
    """
    if variable is None:
        return None
    secret = os.environ.get(variable, "").strip()
    if not secret:
        raise UserError(
            f"`{key}.key_env` names the environment variable {variable}, which is not set on {socket.gethostname()}. "
            f"Set it (export {variable}=...) where megarl is started, or remove the key where the server wants none."
        )
    if not secret.isascii() or not secret.isprintable() or " " in secret:
        raise UserError(
            f"`{key}.key_env`: what {variable} holds is no key: it has spaces, line breaks or letters beyond ASCII. Mend it."
        )
    return secret
