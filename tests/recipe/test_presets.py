"""Presets name functions that exist and settings that those functions have."""

from __future__ import annotations

from typing import get_args

import pytest

from megarl.algorithms.inputs import (
    LOSS_INPUTS,
    SAMPLE_ADVANTAGES,
    SAMPLE_INPUTS,
    TOKEN_ADVANTAGES,
    TOKEN_INPUTS,
    settings_of,
)
from megarl.algorithms.kl import KlKind
from megarl.algorithms.policy_loss import POLICY_LOSSES
from megarl.algorithms.reduce import Reduction
from megarl.recipe.presets import PRESETS

# Settings that are not a parameter of the advantage or the policy loss, and who reads them.
OTHERS = {
    "advantage",
    "policy_loss",
    "reduction",
    "kl_in",
    "kl_kind",
    "kl_coef",
    "drop_zero_variance_groups",
    "refill_rounds",
    "overlong_buffer",
}


def test_every_published_algorithm_has_one() -> None:
    names = (
        "grpo dr_grpo rloo reinforce_pp reinforce_pp_baseline remax opo gpg egpo gdpo gspo gmpo cispo dapo ppo distill"
    )
    assert set(PRESETS) == set(names.split())


@pytest.mark.parametrize("name", PRESETS)
def test_names_exist_and_settings_have_a_reader(name: str) -> None:
    preset = PRESETS[name]
    read = set(settings_of(POLICY_LOSSES[str(preset["policy_loss"])], LOSS_INPUTS))
    if "advantage" in preset:
        advantage = str(preset["advantage"])
        if advantage in SAMPLE_ADVANTAGES:
            read |= set(settings_of(SAMPLE_ADVANTAGES[advantage], SAMPLE_INPUTS))
        else:
            read |= set(settings_of(TOKEN_ADVANTAGES[advantage], TOKEN_INPUTS))
    assert set(preset) <= read | OTHERS
    assert preset["reduction"] in get_args(Reduction)
    assert preset.get("kl_kind", "k1") in get_args(KlKind) and preset.get("kl_in", "loss") in ("loss", "reward")
    assert "kl_coef" not in preset or "kl_in" in preset


def test_groups_that_dapo_drops_are_asked_again() -> None:
    assert PRESETS["dapo"]["drop_zero_variance_groups"] and int(PRESETS["dapo"]["refill_rounds"]) > 0


def test_a_preset_cannot_be_changed_by_accident() -> None:
    with pytest.raises(TypeError):
        PRESETS["mine"] = {}  # type: ignore[index]
