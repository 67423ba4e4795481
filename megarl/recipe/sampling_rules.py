"""The rules about samples of several versions and about the processes that make them, as data; and what follows from staleness.

Which runs overlap: servers generate while the ranks train only where they have devices of their own, so that rollout.offload and
rollout.oversample, which are for servers on ranks' devices, make rollout.max_staleness carry-over.
"""

from __future__ import annotations

import math

from megarl.algorithms.inputs import TOKEN_INPUTS
from megarl.core.errors import UserError
from megarl.recipe.algorithm import Correction
from megarl.recipe.functions import POLICY_LOSS, Asked, asked, is_own
from megarl.recipe.rule import RL, Contradiction, Unread
from megarl.recipe.schema import Recipe

STALE = "set rollout.max_staleness to 1 or more"
# What makes servers generate beside the ranks, or take turns with them.
CARRY_OVER_ONLY = (
    "servers that share the ranks' devices do not generate while the ranks train: staleness is carry-over only there. Set "
    "rollout.oversample above 1 (1.25 is common) to carry groups over, or give the servers devices of their own"
)


def beside_ranks(recipe: Recipe) -> bool:
    """Whether the recipe lets servers generate while the ranks train, as far as their devices are their own."""
    return not recipe.rollout.offload and recipe.rollout.oversample == 1


def overlaps(recipe: Recipe) -> bool:
    """Whether samples are made while the ranks train on others."""
    return recipe.rollout.max_staleness > 0 and beside_ranks(recipe)


def asks_beside(recipe: Recipe) -> str | None:
    """The key that has servers work while the ranks train, for which they need devices of their own; None where none does."""
    if overlaps(recipe):
        return f"rollout.max_staleness {recipe.rollout.max_staleness}"
    return "eval.overlap" if recipe.eval.overlap and beside_ranks(recipe) else None


def check_beside(recipe: Recipe, *, beside: bool) -> None:
    """Whether the servers' devices let the run be what the recipe says. Raises UserError.

    beside: whether the servers share no device with the ranks, as it is found when both have theirs.
    """
    asks = None if beside else asks_beside(recipe)
    if asks is None:
        return
    if overlaps(recipe):
        raise UserError(
            f"rollout.max_staleness is {recipe.rollout.max_staleness}, and there are not devices enough for ranks and servers: "
            f"{CARRY_OVER_ONLY}, or set it to 0."
        )
    raise UserError(
        f"{asks} is set, and there are not devices enough for ranks and servers: servers that share the ranks' devices "
        "do not answer while the ranks train. Remove it, or give the servers devices of their own."
    )


def correction_by_default(recipe: Recipe, *, silent: bool | None = None) -> Correction | None:
    """algorithm.correction, or what stands in its place where the recipe says nothing of it.

    silent: whether it says nothing; not given, the recipe is as it was read, and shows it.

    Samples of older weights are learned from by decoupled PPO (AReaL, arXiv 2505.24298, section 5.2): the ratio that is
    clipped is to the trainer's log-probs at the start of the step, and how far these have come from the policy that
    sampled is an importance weight, truncated.
    """
    algorithm = recipe.algorithm
    if silent is None:
        silent = "correction" not in algorithm.model_fields_set
    if not silent:
        return algorithm.correction
    return Correction() if recipe.rollout.max_staleness > 0 and algorithm.old_logprobs == "trainer" else None


def staleness_notes(recipe: Recipe) -> tuple[str, ...]:
    """What a reader of the recipe should know of samples of older weights; nothing where there are none."""
    rollout, algorithm = recipe.rollout, recipe.algorithm
    if rollout.max_staleness == 0:
        return ()
    versions = f"rollout.max_staleness {rollout.max_staleness}"
    how = "servers generate while the ranks train" if overlaps(recipe) else "unfinished groups are carried over"
    found = [f"{versions}: {how}; no token is trained on that is more than so many weight versions old."]
    if algorithm.correction is not None:
        found.append(
            f"Decoupled PPO: clipped against the trainer's log-probs at the start of the step, weighted by trainer over rollout "
            f"(algorithm.correction: {algorithm.correction.kind}, {algorithm.correction.level})."
        )
    elif not asked(algorithm, "may ask for all").advantages:  # there is nothing that a correction could weigh
        found.append(
            f"{POLICY_LOSS}: {algorithm.policy_loss}: its ratio is to "
            + (
                "what the servers said (algorithm.old_logprobs: rollout), which weighs samples of older weights."
                if algorithm.old_logprobs == "rollout"
                else "the trainer's log-probs at the start of the step: samples of older weights count as if the newest had made "
                "them. Set algorithm.old_logprobs to rollout to weigh them."
            )
        )
    elif algorithm.old_logprobs == "rollout":
        found.append(
            "algorithm.old_logprobs: rollout: ratios are to what the servers said with whatever weights they had, so that older "
            "samples reach a clip sooner; a loss without a ratio (reinforce, gpg) does not weigh them. Decoupled PPO is the "
            "default: remove the key for it."
        )
    else:
        found.append(
            "algorithm.correction: null: samples of older weights count as if the newest had made them. Remove the key for "
            "decoupled PPO, which weighs them."
        )
    return tuple(found)


def _own_of_tokens(recipe: Recipe, asked: Asked) -> bool:
    """Whether the advantage is a function of the user's that has to see all tokens of a step in one place."""
    return is_own(recipe.algorithm.advantage) and bool(asked.advantage & TOKEN_INPUTS.keys())


def _cuts_off(recipe: Recipe, name: str) -> bool:
    """Whether sampling leaves out what is unlikely."""
    return recipe.rollout.top_p < 1 if name == "top_p" else recipe.rollout.top_k > 0


SAMPLING_UNREAD: tuple[Unread, ...] = (
    Unread(
        ("rollout.late",),
        lambda r, _: r.rollout.max_staleness > 0,
        f"a step takes all groups that it asked for, and none is late: {STALE}",
        RL,
    ),
    Unread(
        ("rollout.in_flight", "rollout.keep_kv"),
        lambda r, _: overlaps(r),
        lambda r, _: (
            "nothing runs at the servers when new weights come: "
            + (STALE if beside_ranks(r) else "remove rollout.oversample and rollout.offload, with servers of their own")
        ),
        RL,
    ),
    Unread(
        ("rollout.keep_kv",),
        lambda r, _: r.rollout.in_flight == "in_place",
        "only requests that a sync pauses have a KV cache to keep: set rollout.in_flight to in_place",
        RL,
    ),
    Unread(
        ("eval.overlap",),
        lambda r, _: r.data.eval is not None and beside_ranks(r),
        lambda r, _: (
            "there are no held-out rows to evaluate on: set data.eval to a file"
            if r.data.eval is None
            else "servers that take turns with the ranks do not answer while these train: remove rollout.oversample and "
            "rollout.offload, with servers of their own"
        ),
        RL,
    ),
)

SAMPLING_CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction(
        "rollout.oversample",
        lambda r, _: r.rollout.oversample - 1 > r.rollout.max_staleness,
        lambda r: (
            f"{r.rollout.oversample:g} times a step's groups are asked for, and what is over is carried to later steps, when it "
            f"is behind: set rollout.max_staleness to {math.ceil(r.rollout.oversample - 1)} or more (it is "
            f"{r.rollout.max_staleness}), or rollout.oversample to at most {1 + r.rollout.max_staleness}"
        ),
        RL,
    ),
    Contradiction(
        "rollout.max_staleness",
        lambda r, _: r.rollout.max_staleness > 0 and bool(r.rollout.offload) and r.rollout.oversample == 1,
        lambda r: f"rollout.offload is [{', '.join(r.rollout.offload)}], and {CARRY_OVER_ONLY} (no rollout.offload)",
        RL,
    ),
    Contradiction(
        "rollout.deterministic",
        lambda r, _: r.rollout.deterministic and r.rollout.max_staleness > 0,
        lambda r: (
            f"with rollout.max_staleness {r.rollout.max_staleness} a step takes the groups that finish first, and when a sync "
            "comes decides which weights a token is of: no two runs give the same samples. Set it to 0, or this to false"
        ),
        RL,
    ),
    Contradiction(
        "rollout.piece_tokens",
        lambda r, _: r.rollout.deterministic and r.rollout.piece_tokens is not None,
        lambda r: (
            "with rollout.deterministic a response has to be computed in one go: whether a server still has the pieces before "
            "in its cache depends on what else it did, and computing them again gives other bits. Remove one of the two"
        ),
        RL,
    ),
    Contradiction(
        "rollout.piece_tokens",
        lambda r, _: r.rollout.piece_tokens is not None and r.rollout.piece_tokens >= r.rollout.max_response_tokens,
        lambda r: (
            f"{r.rollout.piece_tokens} tokens are a whole response already: set it below rollout.max_response_tokens "
            f"{r.rollout.max_response_tokens} (a quarter of it is common), or remove it"
        ),
        RL,
    ),
    Contradiction(
        "rollout.collectors",
        lambda r, _: r.rollout.collectors is not None and r.rollout.collectors > r.rollout.num_servers,
        lambda r: (
            f"{r.rollout.collectors} processes for {r.rollout.num_servers} server{'s' * (r.rollout.num_servers > 1)}: one can "
            f"ask 32. Set it to at most {r.rollout.num_servers}, or remove it"
        ),
        RL,
    ),
    Contradiction(
        "rollout.collectors",
        lambda r, asked: (r.rollout.collectors or 1) > 1 and _own_of_tokens(r, asked),
        lambda r: (
            f"algorithm.advantage: {r.algorithm.advantage} is a function of a step's tokens, which has to see all of them in one "
            "place. Set it to 1, or make the function one of samples"
        ),
        RL,
    ),
    *(
        Contradiction(
            f"rollout.{name}",
            lambda r, _, name=name: _cuts_off(r, name),  # type: ignore[misc]
            lambda r, name=name, off=off: (  # type: ignore[misc]
                f"got {getattr(r.rollout, name):g}: samples would come from a part of the distribution alone, and the trainer's "
                "log-probs are of all of it, so that every ratio between the two would be wrong, and nothing would show it. "
                f"Set it to {off}; rollout.temperature makes samples more alike, and the trainer applies the same. Evaluations "
                "have eval.temperature, eval.top_p and eval.top_k"
            ),
            RL,
        )
        for name, off in (("top_p", "1.0"), ("top_k", "-1"))
    ),
)
