"""Whether a step's samples are too far from what the trainer's own model says of them to be learned from. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.core.errors import DriftError, RewindError
from megarl.recipe.algorithm import Algorithm

MEASURED = "rollout/logprob_diff_mean"


def learns(algorithm: Algorithm, step: int, metrics: Mapping[str, float]) -> bool:
    """Whether a step is learned from. metrics: those of its advantages.

    It follows from the step's samples and the weights alone, so that a run that goes on, and a replay, do the same.
    Raises DriftError, or RewindError, where the recipe wants more than that the step is left out.
    """
    most = algorithm.max_logprob_diff
    if most is None or metrics[MEASURED] <= most:  # what is no number is above everything
        return True
    if algorithm.on_logprob_diff == "skip":
        return False
    error = DriftError(
        f"Step {step}: rollout and trainer give the trained tokens log-probs that are {metrics[MEASURED]:.3g} nats apart in the "
        f"mean, and algorithm.max_logprob_diff is {most:g}; nothing was learned from it. What makes them differ: bfloat16 or FP8 "
        "at one side alone, another attention backend, experts chosen otherwise (actor.routing_replay), old samples "
        "(rollout.max_staleness). algorithm.on_logprob_diff: skip leaves such steps out."
    )
    raise RewindError(str(error)) if algorithm.on_logprob_diff == "rewind" else error
