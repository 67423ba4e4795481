"""The first samples of a step, for people to read: `samples/step_000012.jsonl` in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.core.disk import replace_text
from megarl.core.log import get_logger
from megarl.core.types import Sample
from megarl.rewards.grade import FIGURES
from megarl.rollout import filters

log = get_logger(__name__)

# What JSON leaves as it is, and readers that take lines by str.splitlines would break at.
LINE_BREAKS = str.maketrans({character: f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"})


def shown(samples: Sequence[Sample], count: int) -> Sequence[Sample]:
    """The first so many; and the first whose environment raised, where none of them did: its trace is worth reading."""
    raised = [sample for sample in samples if "trace" in sample.metadata][:1]
    first = samples[:count]
    return [*first, *(sample for sample in raised if not any("trace" in each.metadata for each in first))]


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write samples as JSONL for people; tokens are left out, text is kept. What has no grade has no reward: null.

    No run needs the file: what the system refuses is told in the log.
    """
    rows = [
        {
            "id": sample.id,
            "reward": sample.reward if filters.is_usable(sample) else None,
            "parts": sample.reward_parts,
            **({"figures": figures} if (figures := _figures(sample)) else {}),
            "status": sample.status.value,
            "response_tokens": len(sample.response_ids),
            **({"images": count} if (count := len(sample.prompt.images) + len(sample.shown)) else {}),
            **_said(sample),
            "answer": sample.prompt.answer,
            **({"grade_failure": sample.grade_failure} if sample.grade_failure else {}),
            **{name: sample.metadata[name] for name in ("failure", "trace") if name in sample.metadata},
        }
        for sample in samples
    ]
    text = "".join(json.dumps(row, ensure_ascii=False, default=_plain).translate(LINE_BREAKS) + "\n" for row in rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Half a character, where a response ends within one, is none that a file can hold.
        replace_text(path, text.encode(errors="replace").decode())
    except OSError as error:
        log.warning("%s, for reading, could not be written: %s", path, error.strerror or error)


def _plain(value: Any) -> Any:
    """For people, of what is no JSON: environments and rows of Parquet may say numpy's numbers, dates and others."""
    return value.item() if isinstance(value, np.generic) else str(value)


def _said(sample: Sample) -> dict[str, Any]:
    """Prompt and response; of an episode the conversation, and what each of its turns was worth."""
    if "messages" not in sample.metadata:
        return {"prompt": sample.prompt.text, "response": sample.response_text}
    names = ("messages", "turn_rewards")
    told = {name: sample.metadata[name] for name in names if name in sample.metadata}
    numbers = {name: each for name, each in sample.numbers.items() if not name.startswith(FIGURES)}
    return told | ({"numbers": numbers} if numbers else {})


def _figures(sample: Sample) -> dict[str, float]:
    """What graders said beside their scores, by GRADER/KEY."""
    return {name.removeprefix(FIGURES): each for name, each in sample.numbers.items() if name.startswith(FIGURES)}
