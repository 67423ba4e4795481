"""Asks SGLang's own parser about the recipe's flags of a server, in a process of its own: SGLang is never imported here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from megarl.core.errors import UserError
from megarl.core.platform import Platform

KEY = "rollout.server_args"
OVERRIDES = "--json-model-override-args"
SHORTEST = "--json"  # argparse takes the beginning of a flag for it, and no other of SGLang's begins so
# SGLang 0.5.21 ends a response two tokens before its context is full, or its cache where that is smaller, and takes no prompt
# that leaves less than seven (managers/tp_worker.py, managers/scheduler.py). With so many more, a prompt and its response fill
# all that was asked for; one that was cut off just before can be gone on with, and a whole one be looked at by a weight sync.
SPARE_TOKENS = 7
DEADLINE_S = 300.0  # a few seconds of one core; many more where the disk is cold


def split_overrides(words: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    """A user's flags without changes of the model's config, and these: of a flag that comes twice SGLang hears the last alone.

    Raises UserError where such a change is no JSON object.
    """
    rest: list[str] = []
    own: dict[str, object] = {}
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if name.startswith(SHORTEST) and OVERRIDES.startswith(name):
            own |= _json_object(value if equals else next(left, ""))
        else:
            rest.append(word)
    return rest, own


def _json_object(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(
            f"`{KEY}`: {OVERRIDES} is followed by {text[:80]!r}. It takes a JSON object of keys of the model's config.json, "
            """as '{"rope_theta": 500000.0}'."""
        )
    return found


def check_server_args(words: Sequence[str], platform: Platform) -> None:
    """Whether the SGLang that is installed takes these flags. Raises UserError with what its parser says, and `split_overrides`'.

    Where no SGLang is installed, as on a machine that only submits, nothing can be said.
    """
    rest, _ = split_overrides(words)
    if not words or importlib.util.find_spec("sglang") is None:
        return
    command = [sys.executable, "-m", "megarl.serving.sglang_flags", platform.server_module, json.dumps(list(words))]
    try:
        asked = subprocess.run(
            command,
            env={**os.environ, **platform.env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"SGLang did not load within {DEADLINE_S:g} s to look at `{KEY}`. See `megarl doctor`."
        ) from None
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise UserError(f"SGLang does not load, to look at `{KEY}`: {last}. See `megarl doctor`.")
    found = json.loads(asked.stdout.splitlines()[-1])  # after whatever SGLang says while it loads
    if found["problem"] is None:
        _check_whole(rest, found["flags"])
        return
    near = [match for word in words for match in _nearest(word, found["flags"])]
    hint = f" Did you mean {near[0]}?" if near else ""
    raise UserError(
        f"`{KEY}`: the installed SGLang {found['version']} refuses these flags: {found['problem']}.{hint} Its flags: "
        "`python -m sglang.launch_server --help`."
    )


def _check_whole(words: Sequence[str], flags: Sequence[str]) -> None:
    """Raise UserError for the beginning of a flag: all that the recipe knows of flags, it knows by their whole names."""
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in flags:
            whole = next((flag for flag in flags if flag.startswith(name)), "a flag")
            raise UserError(
                f"`{KEY}`: SGLang takes {name} for {whole}. Write the whole name: it may be one that megarl sets."
            )


def _nearest(word: str, flags: Sequence[str]) -> list[str]:
    """The flag that a word that is none was probably meant to be."""
    flag = word.partition("=")[0]
    if not flag.startswith("-") or flag in flags:
        return []
    return get_close_matches(flag, flags, n=1)
