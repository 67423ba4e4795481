"""docs/metrics.md: the table of metrics for people, one part for each group."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megarl.core.metrics import METRICS

_GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "reward": "What the graders said of the step's samples, also of groups that were left out or replaced.",
        "rollout": "The step's samples, as they were generated, also of groups that were left out or replaced.",
        "agent": "The step's episodes; only with a section `agent`.",
        "teacher": "What a teacher behind an address takes; only with `teacher.servers`.",
        "actor": "The update of the policy; where `actor.epochs` is above 1, of the step's last epoch.",
        "critic": "The update of the critic; where `critic.epochs` is above 1, of the step's last epoch.",
        "sft": "Training on demonstrations.",
        "rm": "Training of a reward model on pairs.",
        "dpo": "Training of a policy on pairs.",
        "kto": "Training of a policy on labelled answers.",
        "eval": "Held-out prompts; only at steps with an evaluation.",
        "sync": "The weights on their way to the servers.",
        "data": "The training rows.",
        "perf": "Seconds, rates and memory.",
        "memory": "What ranks held at most, by what was done.",
    }
)


def render_docs() -> str:
    """docs/metrics.md: one table for each group."""
    lines = [
        "# Metrics",
        "",
        "All that a run writes to the console, `metrics.jsonl`, TensorBoard or wandb. Another name is refused.",
        "This page is made from `megarl/core/metrics.py`: `python -m megarl.core.metrics > docs/metrics.md`.",
    ]
    for group, about in _GROUPS.items():
        lines += ["", f"## {group}", about, "", "| name | unit | meaning |", "|---|---|---|"]
        rows = {name: spec for name, spec in METRICS.items() if name.startswith(f"{group}/")}
        lines += [
            f"| `{name}` | {spec.unit} | {spec.meaning.replace('|', chr(92) + '|')} |" for name, spec in rows.items()
        ]
    return "\n".join(lines) + "\n"
