"""Which checkpoints of a run are kept for what its held-out rows said."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from megarl.core.metrics import METRICS, row_of
from megarl.recipe.held_out import Eval
from megarl.recipe.section import PositiveInt, Section


def _held_out(name: str) -> str:
    row = row_of(name)
    group, _, metric = row.partition("/")
    if row not in METRICS or not (group == "eval" or metric.startswith("eval_")):
        raise ValueError(
            f"{name!r} is no metric of held-out rows: wanted is one such as eval/accuracy, eval/set/NAME/pass_at_8 or "
            "sft/eval_loss (docs/metrics.md)"
        )
    return name


def pass_counts(samples_per_prompt: int) -> list[int]:
    """Every K of the eval/pass_at_K that so many answers to a prompt give: 2, 4, 8 ... and all of them."""
    powers = (2**power for power in range(1, samples_per_prompt.bit_length()))
    return sorted({samples_per_prompt, *powers} - {1})


def pass_counts_of_all(held_out: Eval) -> list[int]:
    """Every K of the eval/pass_at_K over the rows of all sets: none has fewer answers to a prompt."""
    return pass_counts(min(each.samples_per_prompt for each in held_out.by_key().values()))


class KeepBest(Section):
    """Checkpoints that are kept because none were better, beside the newest."""

    metric: Annotated[str, AfterValidator(_held_out)] = Field(
        description="what says how good a step is: eval/accuracy, eval/set/NAME/reward, sft/eval_loss ..."
    )
    mode: Literal["max", "min"] = Field("max", description="whether more of it is better, or less")
    count: PositiveInt = Field(1, description="so many")


KeptBest = Annotated[
    KeepBest | None,
    Field(
        description="also keep the best by a metric of the held-out rows, of steps that save and evaluate; default: none"
    ),
]
