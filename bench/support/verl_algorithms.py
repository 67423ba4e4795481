"""verl's side of bench/peers_algorithms, in a process that has verl.

    python -m bench.support.verl_algorithms BATCH.npz FOUND.npz REPEATS

Calls verl's own functions on padded tensors [samples, longest] and writes what they return, with the fastest seconds of each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig

from bench.support.seconds import fastest

Numbers = dict[str, np.ndarray]


def advantages(batch: dict[str, Any]) -> dict[str, Callable[[], torch.Tensor]]:
    """By name: those that are made of rewards."""
    rewards, mask, groups = batch["token_rewards"], batch["mask"], batch["groups"]
    plain = {"token_level_rewards": rewards, "response_mask": mask}
    grouped = {**plain, "index": groups}
    discounted = SimpleNamespace(gamma=float(batch["gamma"]))
    gae = {**plain, "values": batch["values"], "gamma": float(batch["gamma"]), "lam": float(batch["lam"])}
    return {
        "GRPO": lambda: core_algos.compute_grpo_outcome_advantage(**grouped)[0],
        "GRPO, vectorized": lambda: core_algos.compute_grpo_vectorized_outcome_advantage(**grouped)[0],
        "Dr.GRPO": lambda: core_algos.compute_grpo_outcome_advantage(**grouped, norm_adv_by_std_in_grpo=False)[0],
        "RLOO": lambda: core_algos.compute_rloo_outcome_advantage(**grouped)[0],
        "RLOO, vectorized": lambda: core_algos.compute_rloo_vectorized_outcome_advantage(**grouped)[0],
        "OPO": lambda: core_algos.compute_opo_outcome_advantage(**grouped)[0],
        "ReMax": lambda: core_algos.compute_remax_outcome_advantage(reward_baselines=batch["greedy"], **plain)[0],
        "GPG": lambda: core_algos.compute_gpg_outcome_advantage(**grouped)[0],
        "REINFORCE++": lambda: core_algos.compute_reinforce_plus_plus_outcome_advantage(config=discounted, **plain)[0],
        "REINFORCE++ baseline": lambda: core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(**grouped)[0],
        "GAE": lambda: core_algos.compute_gae_advantage_return(**gae)[0],
        "GAE, returns": lambda: core_algos.compute_gae_advantage_return(**gae)[1],
    }


def losses(batch: dict[str, Any]) -> dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    """By name: a loss, and its gradient to the log-probs (or values)."""
    settings = ActorConfig(
        strategy="fsdp",
        rollout_n=8,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=float(batch["clip_low"]),
        clip_ratio_high=float(batch["clip_high"]),
        clip_ratio_c=float(batch["dual_clip"]),
    )

    def policy(form: str, mode: str, advantages: str = "advantages") -> tuple[torch.Tensor, torch.Tensor]:
        given = batch["logprobs"].clone().requires_grad_()
        compute = core_algos.get_policy_loss_fn(form)
        loss, _ = compute(batch["old_logprobs"], given, batch[advantages], batch["mask"], mode, settings)
        loss.backward()
        return loss.detach(), given.grad

    def value() -> tuple[torch.Tensor, torch.Tensor]:
        given = batch["new_values"].clone().requires_grad_()
        clip = float(batch["value_clip"])
        loss, _ = core_algos.compute_value_loss(given, batch["returns"], batch["values"], batch["mask"], clip)
        loss.backward()
        return loss.detach(), given.grad

    forms = {
        "PPO": ("vanilla", "token-mean"),
        "PPO, a sequence's mean": ("vanilla", "seq-mean-token-mean"),
        "PPO, constant": ("vanilla", "seq-mean-token-sum-norm"),
        "GSPO": ("gspo", "seq-mean-token-mean"),
        "GMPO": ("geo_mean", "seq-mean-token-mean", "sequence_advantages"),
        "CISPO": ("cispo", "token-mean"),
    }
    return {**{name: partial(policy, *form) for name, form in forms.items()}, "value": value}


def penalties(batch: dict[str, Any]) -> dict[str, Callable[[], torch.Tensor]]:
    """By name: estimates of the KL."""
    new, old = batch["logprobs"], batch["old_logprobs"]
    return {f"KL {kind}": partial(core_algos.kl_penalty, new, old, kind) for kind in ("k1", "k2", "k3", "abs")}


def corrections(batch: dict[str, Any]) -> dict[str, Callable[[], torch.Tensor]]:
    """By name: weights of tokens for what the rollout's policy was another than the trainer's."""

    def weights(bounds: str | float, **rejection: str) -> torch.Tensor:
        made, mask, _ = compute_rollout_correction_and_rejection_mask(
            batch["logprobs"], batch["old_logprobs"], batch["mask"], "token", bounds, **rejection
        )
        found: torch.Tensor = made.batch["rollout_is_weights"] * mask
        return found

    high, low, near = float(batch["max_ratio"]), float(batch["min_ratio"]), float(batch["mean_ratio"])
    rejected = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": f"{1 / near}_{near}"}
    return {
        "TIS": lambda: weights(high),
        "IcePop": lambda: weights(f"{low}_{high}"),
        "TIS and rejection": lambda: weights(high, **rejected),
    }


def main() -> None:
    """Read, call, write."""
    torch.set_num_threads(1)
    read = np.load(sys.argv[1])
    batch: dict[str, Any] = {
        name: torch.from_numpy(read[name]) if read[name].dtype == np.float32 else read[name] for name in read.files
    }
    found: Numbers = {}
    for name, call in {**advantages(batch), **losses(batch), **penalties(batch), **corrections(batch)}.items():
        result, seconds = fastest(call, int(sys.argv[3]))
        parts = result if isinstance(result, tuple) else (result,)
        for number, part in enumerate(parts):
            found[f"{name}/{number}"] = part.numpy()
        found[f"{name}/seconds"] = np.array(seconds)
    np.savez(sys.argv[2], allow_pickle=False, **found)


if __name__ == "__main__":
    main()
