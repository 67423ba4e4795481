"""The rows of the table of metrics (metrics.py) that supervised runs write, those of held-out rows among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True)
class MetricSpec:
    """One metric. `format` is a Python format specification, for people; files keep every digit."""

    unit: str
    meaning: str
    format: str = ".4g"


_OF_LOSSES: Mapping[str, MetricSpec] = MappingProxyType(
    {
        "sft/loss": MetricSpec("nats", "loss of tokens as sft.loss says, mean over the step's assistant tokens", ".4f"),
        "rm/loss": MetricSpec(
            "nats",
            "-log sigmoid(chosen - rejected - margin) + center_coef (chosen + rejected)^2, mean over pairs",
            ".4f",
        ),
        "rm/accuracy": MetricSpec(
            "fraction",
            "pairs with the chosen answer's score above the rejected one's / pairs; equal scores count half",
            ".3f",
        ),
        "rm/margin": MetricSpec("score", "chosen answer's score - rejected one's, mean over pairs", ".3f"),
        "rm/score": MetricSpec(
            "score", "score after an answer's last token, mean over chosen and rejected ones", ".3f"
        ),
        "dpo/loss": MetricSpec("nats", "loss of pairs as dpo.loss says, mean over pairs; ipo has no unit", ".4f"),
        "dpo/accuracy": MetricSpec(
            "fraction",
            "pairs with the chosen answer's reward above the rejected one's / pairs; equal ones count half",
            ".3f",
        ),
        "dpo/margin": MetricSpec("nats", "chosen_reward - rejected_reward", ".3f"),
        "dpo/chosen_reward": MetricSpec(
            "nats",
            "dpo.beta x (log-prob of the chosen answer - the reference's), mean over pairs; simpo: dpo.beta x log-prob a token; "
            "orpo: log odds of the mean token",
            ".3f",
        ),
        "dpo/rejected_reward": MetricSpec("nats", "the same of the rejected answer", ".3f"),
        "kto/loss": MetricSpec(
            "1",
            "1 - sigmoid of how far a row's reward is on the right side of beta kl, times the label's weight; mean over rows",
            ".4f",
        ),
        "kto/accuracy": MetricSpec(
            "fraction",
            "rows with a reward above beta kl where desirable, below it where not / rows; equal ones count half",
            ".3f",
        ),
        "kto/log_ratio": MetricSpec("nats", "log-prob of the answer - the reference's, mean over rows", ".3f"),
        "kto/kl": MetricSpec(
            "nats",
            "KL of the policy to the reference: mean log-ratio of answers behind others' prompts, at least 0; 0 with apo_zero",
            ".3f",
        ),
        "kto/desirable_reward": MetricSpec(
            "nats", "kto.beta x log_ratio, mean over desirable rows; none without any", ".3f"
        ),
        "kto/undesirable_reward": MetricSpec("nats", "the same of undesirable rows", ".3f"),
    }
)
# Of an update, as the actor has them too; those of demonstrations are the actor's.
_OF_UPDATES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "grad_norm": ("1", ".3g"),
        "grad_share_max": ("fraction", ".3f"),
        "skipped_steps": ("optimizer steps", ".0f"),
        "lr": ("1", ".2e"),
    }
)
_WHOSE: Mapping[str, str] = MappingProxyType({"rm": "the reward model", "dpo": "a DPO run", "kto": "a KTO run"})


def _rows() -> Iterator[tuple[str, MetricSpec]]:
    """All rows: `rm/eval_accuracy` is `rm/accuracy` of the held-out rows."""
    yield from _OF_LOSSES.items()
    for group, whose in _WHOSE.items():
        for name, (unit, form) in _OF_UPDATES.items():
            yield f"{group}/{name}", MetricSpec(unit, f"as actor/{name}, of {whose}", form)
    for name, spec in _OF_LOSSES.items():
        held_out = replace(spec, meaning=f"{name} of the held-out rows; at some steps")
        yield name.replace("/", "/eval_"), held_out


SUPERVISED: Mapping[str, MetricSpec] = MappingProxyType(dict(_rows()))
