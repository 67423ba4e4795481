"""What an algorithm's function is given: its parameters' names say so. Without torch.

A function of this package, or one that a recipe names by import path, asks for an input by having a parameter of that
name (the tables below); every other parameter is a setting of the recipe, or has a default. So a new algorithm is one
function, and what it needs (a critic, a reference, a teacher, groups) can be told before anything starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from megarl.algorithms.advantage import (
    egpo_advantages,
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    grpo_loo_advantages,
    opo_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from megarl.algorithms.returns import discounted_returns, distill_advantages, gae, reinforce_pp_advantages
from megarl.algorithms.turn_groups import turn_group_advantages
from megarl.core.errors import UserError

Inputs = Mapping[str, str]

# One number a sample, [N], over the whole step: numpy arrays. The result is spread over the sample's trained tokens. A function
# that asks for something of tokens has them in the order of the sequences: N is S.
SAMPLE_INPUTS: Inputs = MappingProxyType(
    {
        "rewards": "[N] float32, with the penalties of reward shaping in them",
        "group_index": "[N] int64 from 0: samples of one prompt have one number",
        "lengths": "[N] int64, trained tokens",
        "mean_nll": "[N] float32, minus the mean log-prob of the trained tokens at rollout",
        "truncated": "[N] bool, whether it ended at a limit of length, or at a budget of its episode",
        "reward_parts": "[N, K] float64, each grader's own score; nan where it gave none: it does not grade such rows",
        "reward_weights": "[K] float64, what each of these counts for in the reward; an environment's counts 1",
        "reward_names": "[K] text, whose scores they are: the graders' names in the recipe's order, then environment",
        "greedy_rewards": "[G] float32, shaped reward of the greedy answer to each group's prompt; costs an answer a prompt",
    }
)
# One number a token, [T], all sequences of the step end to end, label-aligned: numpy arrays.
TOKEN_INPUTS: Inputs = MappingProxyType(
    {
        "token_rewards": "[T] float32: the sample's reward at its last trained token, less the KL where it is in the reward",
        "mask": "[T] float32, 1 where the label is trained on",
        "cu_seqlens": "[S + 1] integers, where sequences begin and end",
        "sequence_groups": "[S] int64 from 0: sequences of one prompt have one number; all of a prompt's are there",
        "first_turns": "[S] int64, number of each sequence's first turn in the mask; above 0 where earlier ones are too old",
        "values": "[T] float32, of the critic; needs one",
        "logprobs": "[T] float32, of the actor before the step's update",
        "ref_logprobs": "[T] float32, of the reference; needs one",
        "teacher_logprobs": "[T] float32, of the teacher; needs one",
    }
)
# One number a token of a micro-batch on a rank, [T]: tensors. Where the mask is 0 they are 0.
LOSS_INPUTS: Inputs = MappingProxyType(
    {
        "logprobs": "[T], of the policy under training; the one that receives a gradient",
        "old_logprobs": "[T], of the actor before the step's update, or the rollout's own",
        "advantages": "[T], with off-policy weights in them where the recipe asks for them",
        "sequence_log_ratio": "[T], mean of logprobs - old_logprobs over the token's sequence, over context-parallel ranks",
        "sequence_mean": "function of [T]: each token has the mean over its sequence's trained tokens, [T], without gradient",
        "teacher_logprobs": "[T], of the teacher; needs one",
        "top_logprobs": "[T, k + 1], of the policy under training, at the teacher's k likeliest tokens, and at all others",
        "teacher_top_logprobs": "[T, k + 1], of the teacher, at the same; needs one",
    }
)

SAMPLE_ADVANTAGES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "grpo": group_advantages,
        "rloo": rloo_advantages,
        "grpo_loo": grpo_loo_advantages,
        "reinforce_pp_baseline": reinforce_pp_baseline_advantages,
        "remax": remax_advantages,
        "opo": opo_advantages,
        "gpg": gpg_advantages,
        "egpo": egpo_advantages,
        "gdpo": gdpo_advantages,
    }
)
TOKEN_ADVANTAGES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "gae": gae,
        "reinforce_pp": reinforce_pp_advantages,
        "distill": distill_advantages,
        "grpo_turns": turn_group_advantages,
    }
)

# What is whitened at its end, whatever a recipe says, without that: for steps that lie in several parts.
WHITENED: Mapping[str, Callable[..., Any]] = MappingProxyType({"reinforce_pp": discounted_returns})


def wanted(function: Callable[..., Any], inputs: Inputs) -> frozenset[str]:
    """Which of the inputs the function asks for."""
    return frozenset(parameters(function)) & frozenset(inputs)


def settings_of(function: Callable[..., Any], inputs: Inputs) -> dict[str, bool]:
    """The function's other parameters, and whether each must be given because it has no default."""
    others = {name: spec for name, spec in parameters(function).items() if name not in inputs}
    return {name: spec.default is inspect.Parameter.empty for name, spec in others.items()}


def check_function(function: Callable[..., Any], inputs: Inputs, settings: Collection[str], where: str) -> None:
    """Raises UserError where the function asks for something that is neither an input nor among the settings' names.

    where: what names the function, such as `algorithm.advantage: my_module:my_advantages`.
    """
    missing = [name for name, needed in settings_of(function, inputs).items() if needed and name not in settings]
    if missing:
        raise UserError(
            f"{where} has parameters that nothing fills: {', '.join(missing)}. It may ask for {', '.join(sorted(inputs))}; "
            f"settings: {', '.join(sorted(settings)) or 'none'}. Rename the parameter, or give it a default."
        )
    if not wanted(function, inputs):
        raise UserError(f"{where} asks for none of {', '.join(sorted(inputs))}: it would have nothing to work on.")


def call(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call the function with what it asks for by name; what it does not ask for is left out."""
    return function(**{name: given[name] for name in parameters(function) if name in given})


@cache
def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The function's parameters by name, those that can be given by name."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = {name: spec for name, spec in inspect.signature(function).parameters.items() if spec.kind in named}
    return MappingProxyType(found)
