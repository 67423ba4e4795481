"""What episodes were like, what graders said beside their scores, and how long a teacher took, from the numbers that
collectors told of them; and how far servers guessed ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megarl.rewards.grade import FIGURES, first_figures
from megarl.rollout.facts import Flags, GroupFacts
from megarl.rollout.single_turn import PER_PASS
from megarl.rollout.teacher import FAILURES, WAITED

Numbers = Mapping[str, NDArray[np.float64]]

MEANS = ("policy_tokens", "environment_tokens", "generation_s", "environment_s", "tools_s", "tool_calls", "sequences")
SUMS = ("environment_failures", "tool_failures", "tool_results_cut")
FAMILIES = ("truncated_by/", "by/")  # of means


def episode_metrics(seen: Sequence[GroupFacts], kept: Sequence[Flags]) -> dict[str, float]:
    """Of a step's episodes, and of what graders said beside their scores. kept: of each group, which samples can be used."""
    pairs = zip(seen, kept, strict=True)
    used = _joined({name: values[flags] for name, values in facts.numbers.items()} for facts, flags in pairs)
    every = _joined(facts.numbers for facts in seen)
    if not every:
        return {}
    turns = used.get("turns", np.zeros(0))
    means = {name: values for name, values in used.items() if name in MEANS or name.startswith(FAMILIES)}
    return {
        **({"agent/turns_mean": float(turns.mean()), "agent/turns_max": float(turns.max())} if len(turns) else {}),
        **{f"agent/{name}": float(values.mean()) for name, values in means.items() if len(values)},
        **{f"agent/{name}": float(every[name].sum()) for name in SUMS if name in every},
        **{f"{FIGURES}{name}": mean for name, mean in _figures(used).items()},
        **_teacher_metrics(every),
        **({f"rollout/{PER_PASS}": float(used[PER_PASS].mean())} if len(used.get(PER_PASS, ())) else {}),
    }


def _teacher_metrics(every: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """How long a teacher behind an address was waited for. every: also of samples that it said nothing of."""
    if not len(waited := every.get(WAITED, np.zeros(0))):
        return {}
    return {
        "teacher/wait_s_mean": float(waited.mean()),
        "teacher/wait_s_max": float(waited.max()),
        "teacher/failures": float(every[FAILURES].sum()),
    }


def eval_metrics(parts: Iterable[Numbers]) -> dict[str, float]:
    """Of held-out episodes: their turns, and what the environment counted; what graders said beside their scores."""
    found = _joined(parts)
    return {
        **{
            "eval/turns_mean" if name == "turns" else f"eval/{name}": float(values.mean())
            for name, values in found.items()
            if len(values) and (name == "turns" or name.startswith("by/"))
        },
        **{f"eval/by/{name}": mean for name, mean in _figures(found).items()},
    }


def _figures(found: Numbers) -> dict[str, float]:
    """Means by GRADER/KEY, over the samples that have it."""
    by_grader: dict[str, list[str]] = {}
    for name in (each for each, values in found.items() if each.startswith(FIGURES) and len(values)):
        grader, key = name.removeprefix(FIGURES).split("/")
        by_grader.setdefault(grader, []).append(key)
    names = (f"{grader}/{key}" for grader, keys in by_grader.items() for key in first_figures(keys))
    return {name: float(found[f"{FIGURES}{name}"].mean()) for name in names}


def _joined(parts: Iterable[Numbers]) -> dict[str, NDArray[np.float64]]:
    """By name; nan, where a sample has none of it, is left out."""
    found: dict[str, list[NDArray[np.float64]]] = {}
    for part in parts:
        for name, values in part.items():
            found.setdefault(name, []).append(values[~np.isnan(values)])
    return {name: np.concatenate(found[name]) for name in sorted(found)}
