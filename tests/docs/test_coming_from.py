"""docs/coming_from.md: each key of another system's run stands in our recipe beside it, under the name of the glossary."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megarl.recipe.glossary import ENTRIES
from megarl.recipe.load import load_recipe
from tests.docs.pages import DOCS, blocks

PAGE = (DOCS / "coming_from.md").read_text()
# Keys that have no other side: what the page's text, the model's config.json or the layout answer for.
WITHOUT = {"apply_chat_template", "args", "bf16", "enabled", "model", "split", "use_vllm", "zero_stage"}

# What their runs leave unsaid, and ours would have otherwise: verl's generated configuration for Megatron, TRL's GRPOConfig with
# transformers' TrainingArguments, the defaults of OpenRLHF's train_ppo_ray, NeMo-RL's grpo_math_1B.yaml.
UNSAID: dict[str, dict[str, Any]] = {
    "verl": {
        "algorithm.reduction": "token-mean",
        "algorithm.dual_clip": 3.0,
        "actor.optimizer.weight_decay": 0.01,
        "actor.optimizer.beta2": 0.999,
    },
    "slime": {"algorithm.reduction": "sequence-mean"},
    "TRL": {
        "algorithm.correction": {"kind": "mask", "level": "sequence", "low": 0.0, "high": 3.0, "reject": None},
        "actor.optimizer.beta2": 0.999,
        "actor.optimizer.schedule": "linear",
    },
    "OpenRLHF": {
        "critic.path": "models/Llama-3-8b-rm",
        "algorithm.kl_kind": "k1",
        "algorithm.kl_in": "reward",
        "actor.optimizer.beta2": 0.95,
        "actor.optimizer.schedule": "cosine",
        "actor.optimizer.min_lr": 5.0e-8,
        "critic.optimizer.min_lr": 9.0e-7,
    },
    "NeMo-RL": {
        "algorithm.kl_kind": "k3",
        "algorithm.kl_in": "loss",
        "algorithm.reduction": "token-mean",
        "actor.optimizer.weight_decay": 0.01,
        "actor.optimizer.beta1": 0.9,
        "actor.optimizer.beta2": 0.999,
        "actor.optimizer.schedule": "constant",
    },
}


def theirs(system: str) -> list[str]:
    """The names of the keys of their run, without sections and dashes."""
    section = PAGE.split(f"\n## {system}\n")[1].split("\n## ")[0]
    block = next(each for each in blocks(section) if each.language in ("bash", "py"))
    if block.language == "py":
        return re.findall(r"^\s+(\w+)=", block.text, flags=re.MULTILINE)
    flags = re.findall(r"\s--([\w-]+)", block.text) or re.findall(r"([\w.]+)=", block.text)
    return [flag.rpartition(".")[2].replace("-", "_") for flag in flags]


@pytest.mark.parametrize("system", ["verl", "slime", "TRL", "OpenRLHF", "NeMo-RL"])
def test_each_key_of_theirs_is_in_the_recipe_beside_it(system: str, tmp_path: Path) -> None:
    peer = system.lower().replace("-", "_")
    name = f"from_{peer}.yaml"
    (tmp_path / name).write_text(next(each.text for each in blocks(PAGE) if each.name == name))
    resolved = load_recipe(tmp_path / name).resolved
    keys = theirs(system)
    assert len(keys) > 12
    for key in keys:
        ours = [
            each.key for each in ENTRIES if key in (name.rpartition(".")[2] for name in getattr(each, peer).split())
        ]
        assert ours or key in WITHOUT, f"{key} is in no row of the glossary"
        assert key in WITHOUT or any(_has(resolved, each) for each in ours), f"{key}: none of {ours} is in {name}"
    for each, value in UNSAID[system].items():
        found: Any = resolved
        for part in each.split("."):
            found = found[part]
        assert found == value, each


def _has(values: dict[str, Any], key: str) -> bool:
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True
