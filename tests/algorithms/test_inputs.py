"""How a function's parameters say what it is given, for megarl's own functions and a user's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megarl
from megarl.algorithms.inputs import (
    LOSS_INPUTS,
    SAMPLE_ADVANTAGES,
    SAMPLE_INPUTS,
    TOKEN_ADVANTAGES,
    TOKEN_INPUTS,
    call,
    check_function,
    settings_of,
    wanted,
)
from megarl.algorithms.policy_loss import POLICY_LOSSES
from megarl.core.errors import UserError

NUM_SAMPLES = 6


def median_advantages(rewards: np.ndarray, group_index: np.ndarray, scale: float = 2.0) -> np.ndarray:
    """What a user may write."""
    medians = np.array([np.median(rewards[group_index == group]) for group in range(group_index.max() + 1)])
    return np.asarray((rewards - medians[group_index]) * scale, np.float32)


def test_what_is_asked_for() -> None:
    assert wanted(median_advantages, SAMPLE_INPUTS) == {"rewards", "group_index"}
    assert settings_of(median_advantages, SAMPLE_INPUTS) == {"scale": False}
    assert wanted(TOKEN_ADVANTAGES["gae"], TOKEN_INPUTS) == {"token_rewards", "values", "mask", "cu_seqlens"}
    assert "teacher_logprobs" in wanted(POLICY_LOSSES["distill"], LOSS_INPUTS)
    assert "old_logprobs" not in wanted(POLICY_LOSSES["gspo"], LOSS_INPUTS)
    assert settings_of(POLICY_LOSSES["ppo"], LOSS_INPUTS) == {"clip_low": True, "clip_high": True, "dual_clip": False}


def test_a_call_passes_what_is_asked_for_and_nothing_else() -> None:
    given = {"rewards": np.array([1, 0, 5], np.float32), "group_index": np.array([0, 0, 1]), "clip_low": 0.2}
    assert call(median_advantages, given).tolist() == [1, -1, 0]
    assert call(median_advantages, {**given, "scale": 4.0}).tolist() == [2, -2, 0]


def test_a_parameter_that_nothing_fills_is_refused() -> None:
    def odd(rewards: np.ndarray, temper: float) -> np.ndarray:
        return rewards * temper

    with pytest.raises(UserError, match=r"algorithm\.advantage: odd has parameters that nothing fills: temper"):
        check_function(odd, SAMPLE_INPUTS, ["clip_low"], "algorithm.advantage: odd")
    check_function(odd, SAMPLE_INPUTS, ["temper"], "algorithm.advantage: odd")
    with pytest.raises(UserError, match="asks for none of"):
        check_function(lambda: 0, SAMPLE_INPUTS, [], "algorithm.advantage: odd")


SETTINGS = ("normalize_std", "clip_low", "clip_high", "distill_beta", "distill_forward_weight")


@pytest.mark.parametrize("name", SAMPLE_ADVANTAGES)
def test_sample_advantages_can_be_called_by_name(name: str) -> None:
    function = SAMPLE_ADVANTAGES[name]
    check_function(function, SAMPLE_INPUTS, SETTINGS, name)
    given = {
        "rewards": np.arange(NUM_SAMPLES, dtype=np.float32),
        "group_index": np.arange(NUM_SAMPLES) // 2,
        "lengths": np.full(NUM_SAMPLES, 3),
        "mean_nll": np.ones(NUM_SAMPLES, np.float32),
        "truncated": np.zeros(NUM_SAMPLES, np.bool_),
        "reward_parts": np.arange(2.0 * NUM_SAMPLES).reshape(NUM_SAMPLES, 2),
        "reward_weights": np.ones(2),
        "reward_names": ["right", "style"],
        "greedy_rewards": np.zeros(NUM_SAMPLES, np.float32),
        "normalize_std": True,
    }
    assert given.keys() >= SAMPLE_INPUTS.keys()
    assert call(function, given).shape == (NUM_SAMPLES,)


@pytest.mark.parametrize("name", TOKEN_ADVANTAGES)
def test_token_advantages_can_be_called_by_name(name: str) -> None:
    check_function(TOKEN_ADVANTAGES[name], TOKEN_INPUTS, SETTINGS, name)
    given = {column: np.ones(4, np.float32) for column in TOKEN_INPUTS}
    given |= {"cu_seqlens": np.array([0, 1, 4]), "sequence_groups": np.array([0, 1]), "first_turns": np.array([0, 1])}
    result = call(TOKEN_ADVANTAGES[name], given)
    assert (result.advantages if name == "gae" else result).shape == (4,)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses_ask_for_known_inputs(name: str) -> None:
    check_function(POLICY_LOSSES[name], LOSS_INPUTS, SETTINGS, name)
    assert "logprobs" in wanted(POLICY_LOSSES[name], LOSS_INPUTS)


def test_the_documentation_s_own_algorithm_works() -> None:
    page = (Path(megarl.__file__).parent.parent / "docs" / "algorithms.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    module: dict[str, Any] = {}
    exec(code, module)
    check_function(module["median_advantages"], SAMPLE_INPUTS, [], "advantage")
    check_function(module["gains_only_loss"], LOSS_INPUTS, ["clip_low", "clip_high"], "policy_loss")
    given = {"rewards": np.array([0, 1, 9, 4], np.float32), "group_index": np.array([0, 0, 0, 1])}
    assert call(module["median_advantages"], given).tolist() == [-1, 0, 8, 0]
    columns = {"logprobs": torch.zeros(2), "old_logprobs": torch.zeros(2), "advantages": torch.tensor([1.0, -1.0])}
    result = call(module["gains_only_loss"], {**columns, "clip_low": 0.2, "clip_high": 0.2})
    assert result.loss.tolist() == [-1, 0]
