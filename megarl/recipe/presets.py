"""Published algorithms as plain dictionaries of settings, by name: what a recipe would otherwise spell out.

A preset is where a recipe starts; what the recipe says itself comes on top. Values are those of the papers where they give
any. Nothing is imported: a preset is data.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Preset = Mapping[str, str | float | bool]

_PRESETS: dict[str, Preset] = {
    # arXiv 2402.03300
    "grpo": {
        "advantage": "grpo",
        "normalize_std": True,
        "policy_loss": "ppo",
        "reduction": "sequence-mean",
        "kl_in": "loss",
        "kl_kind": "k3",
        "kl_coef": 0.04,
    },
    # arXiv 2503.20783
    "dr_grpo": {"advantage": "grpo", "normalize_std": False, "policy_loss": "ppo", "reduction": "constant"},
    # arXiv 2402.14740
    "rloo": {"advantage": "rloo", "policy_loss": "reinforce", "reduction": "constant"},
    # arXiv 2501.03262
    "reinforce_pp": {
        "advantage": "reinforce_pp",
        "gamma": 1.0,
        "policy_loss": "ppo",
        "reduction": "token-mean",
        "kl_in": "reward",
        "kl_kind": "k1",
        "kl_coef": 0.01,
    },
    "reinforce_pp_baseline": {
        "advantage": "reinforce_pp_baseline",
        "policy_loss": "ppo",
        "reduction": "token-mean",
        "kl_in": "loss",
        "kl_kind": "k2",
        "kl_coef": 0.001,
    },
    # arXiv 2310.10505
    "remax": {"advantage": "remax", "policy_loss": "reinforce", "reduction": "constant"},
    # arXiv 2505.23585: one optimizer step on each step's samples, no KL, no entropy bonus
    "opo": {"advantage": "opo", "policy_loss": "reinforce", "reduction": "constant"},
    # arXiv 2504.02546
    "gpg": {"advantage": "gpg", "normalize_std": False, "policy_loss": "gpg", "reduction": "token-mean"},
    # arXiv 2602.22751
    "egpo": {"advantage": "egpo", "normalize_std": True, "policy_loss": "ppo", "reduction": "sequence-mean"},
    # arXiv 2601.05242: GRPO with each grader's score normalised for itself
    "gdpo": {"advantage": "gdpo", "policy_loss": "ppo", "reduction": "sequence-mean"},
    # arXiv 2507.18071
    "gspo": {
        "advantage": "grpo",
        "normalize_std": True,
        "policy_loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "reduction": "sequence-mean",
    },
    # arXiv 2507.20673: the ratio of a token between exp(-0.4) and exp(0.4)
    "gmpo": {
        "advantage": "grpo",
        "normalize_std": True,
        "policy_loss": "gmpo",
        "clip_low": 0.4,
        "clip_high": 0.4,
        "reduction": "sequence-mean",
    },
    # arXiv 2506.13585: no lower bound; the ratio counts for at most 5
    "cispo": {
        "advantage": "grpo",
        "normalize_std": True,
        "policy_loss": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "reduction": "token-mean",
    },
    # arXiv 2503.14476; overlong_buffer: share of the longest response that is the penalty's slope. refill_rounds: the paper asks
    # until a step is full; ten batches of prompts at most are what others bound it by, and data that teach nothing never end it
    "dapo": {
        "advantage": "grpo",
        "normalize_std": True,
        "policy_loss": "ppo",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "reduction": "token-mean",
        "drop_zero_variance_groups": True,
        "refill_rounds": 9,
        "overlong_buffer": 0.2,
    },
    # arXiv 1707.06347, with 1506.02438
    "ppo": {
        "advantage": "gae",
        "gamma": 1.0,
        "lam": 0.95,
        "policy_loss": "ppo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "reduction": "token-mean",
        "kl_in": "reward",
        "kl_kind": "k1",
    },
    # arXiv 2306.08543, 2306.13649; no advantages: the loss asks the teacher
    "distill": {"policy_loss": "distill", "reduction": "token-mean"},
}
PRESETS: Mapping[str, Preset] = MappingProxyType(_PRESETS)
