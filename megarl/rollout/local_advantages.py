"""What a step is learned from, where its samples are: one collector's part of the advantages, returns and weights.

In two turns, because some of it is over the whole step, which lies in several collectors. `LocalAdvantages.measure` says
what the coordinator has to know, in numbers; `StepAdvantages` (step_advantages.py) settles it; `finish` makes columns.

The sequences of a collector are laid end to end, shard by shard. A column is one flat float32 [T] for each shard, in the
order of that shard's Block. No engines, and nothing that travels but numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.algorithms import correction as importance
from megarl.algorithms.correction import WeightSums
from megarl.algorithms.inputs import call
from megarl.algorithms.moments import Moments, moments
from megarl.algorithms.ragged import trained
from megarl.algorithms.returns import AdvantagesAndReturns, kl_penalty, token_rewards, whiten
from megarl.algorithms.shaping import overlong_penalty
from megarl.core.errors import MegarlError
from megarl.core.types import BatchInfo, Block, FloatArray, IntArray, ShardPlan
from megarl.recipe.agent_rules import score_weights
from megarl.recipe.algorithm import Algorithm, Correction, RejectBounds
from megarl.recipe.functions import asked, before_whitening, is_per_token, settings
from megarl.recipe.schema import Recipe
from megarl.rollout.batcher import Part, StepSamples
from megarl.rollout.facts import Flags
from megarl.rollout.sequences import NO_NUMBERS, Sequences
from megarl.rollout.turns import by_turn, first_turns, moved_to_turns

_ROLES = ("values", "ref_logprobs", "teacher_logprobs")  # whose columns a function of tokens may ask for
# The roles' columns that advantages are made of. Others, as a teacher's likeliest tokens are, go to the updates alone.
READ = frozenset({"old_logprobs", "scores", *_ROLES})

FlatColumns = Mapping[str, Sequence[FloatArray]]  # by name; one [T] a shard, in the order of its block


@dataclass(frozen=True)
class SampleNumbers:
    """What a collector has to know of its n samples of a step, by rising index in the step; arrays are [n].

    rewards: the graders'. reward_parts: [n, K]. kl_coef: `StepAdvantages.kl_coef`. greedy_rewards: [G], as of StepFacts; only a
    user's function of tokens may ask for them, and then all samples of the step are here.
    """

    rewards: FloatArray
    group_index: IntArray
    response_tokens: IntArray
    mean_nll: FloatArray
    truncated: Flags
    reward_parts: NDArray[np.float64]
    kl_coef: float
    greedy_rewards: FloatArray


@dataclass(frozen=True)
class StepPlan:
    """A step: plans, one a shard; parts, one a collector, and what each has to know for the advantages."""

    info: BatchInfo
    plans: tuple[ShardPlan, ...]
    parts: tuple[Part, ...]
    numbers: tuple[SampleNumbers, ...]


def numbers_of(samples: StepSamples, num_owners: int, kl_coef: float) -> tuple[SampleNumbers, ...]:
    """What each collector has to know of its samples."""
    found = []
    for owner in range(num_owners):
        mine = samples.owners == owner
        found.append(
            SampleNumbers(
                samples.rewards[mine],
                samples.group_index[mine],
                samples.response_tokens[mine],
                samples.mean_nll[mine],
                samples.truncated[mine],
                samples.reward_parts[mine],
                kl_coef,
                samples.greedy_rewards,
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class Measured:
    """What a collector tells of its n samples of a step. Small: numbers of samples, none of tokens.

    sample_index: [n], their index in the step, rising; the other arrays are in this order. trained_tokens: over all of
    them. kl_coef: what a nat of KL cost. token_rewards: [n] float32, sum of what tokens are rewarded with less what their
    KL costs; None where the advantage is one number a token. scores: [n] float32, the reward model's at the last token,
    before its weight. kl: [n] float64, sum of the KL to the reference over trained tokens; only where it is in the reward.
    logprob_diff: [n] float64, sum over trained tokens of |log-prob at rollout - the trainer's|; only where it is bounded.
    unwhitened: moments of the advantages of trained tokens, where these get whitened. residuals, returns: moments of
    returns - values and of the returns over trained tokens, where a critic learns them.
    """

    sample_index: IntArray
    trained_tokens: int
    kl_coef: float
    token_rewards: FloatArray | None = None
    scores: FloatArray | None = None
    kl: NDArray[np.float64] | None = None
    logprob_diff: NDArray[np.float64] | None = None
    unwhitened: Moments | None = None
    residuals: Moments | None = None
    returns: Moments | None = None


@dataclass(frozen=True)
class Settled:
    """What the coordinator answers one collector.

    advantages: [n] float32, one a sample, in the order of its `Measured.sample_index`; None where there is one number a
    token, and whitened where they get it. over: moments of the whole step's advantages of tokens, where these get whitened.
    """

    advantages: FloatArray | None = None
    over: Moments | None = None


@dataclass(frozen=True)
class Learned:
    """A collector's part of what the update learns from.

    columns: by name (see `column_names`), one float32 [T] a shard in the order of its block, 0 where nothing is trained.
    sums: what the correction did, for `StepAdvantages.metrics`; of nothing where the recipe has none.
    """

    columns: dict[str, list[FloatArray]]
    sums: WeightSums


def column_names(recipe: Recipe) -> tuple[str, ...]:
    """The columns that advantages come to, in order."""
    algorithm = recipe.algorithm
    names = ["advantages"] if asked(algorithm, "look").advantages else []
    names += ["returns"] if recipe.critic is not None else []
    names += ["old_logprobs"] if algorithm.old_logprobs == "rollout" else []
    return tuple(names)


def graders_of(recipe: Recipe) -> dict[str, Any]:
    """Whose scores reward_parts has, and what each counts for in the reward."""
    weights = score_weights(recipe)
    return {"reward_names": list(weights), "reward_weights": np.array([*weights.values()], np.float64)}


def by_length(recipe: Recipe, graded: FloatArray, response_tokens: IntArray) -> FloatArray:
    """The graders' rewards less the overlong penalty: [N] float32. Of greedy answers too: what is compared has the same scale."""
    share, most = recipe.algorithm.overlong_buffer, recipe.rollout.max_response_tokens
    return graded if share is None else graded + overlong_penalty(response_tokens, most, max(1, round(share * most)))


def sample_rewards(recipe: Recipe, graded: FloatArray, response_tokens: IntArray, scores: FloatArray) -> FloatArray:
    """The graders' rewards less the overlong penalty, and a reward model's score of the whole sequence: [N] float32.

    graded: [N]. response_tokens: [N]. scores: [N], of the reward model; not looked at where it scores no sequences.
    """
    rewards, model = by_length(recipe, graded, response_tokens), recipe.reward_model
    if model is not None and model.level == "sequence":
        rewards = rewards + np.float32(model.weight) * scores
    return rewards


def checked(result: Any, counts: NDArray[np.bool_], algorithm: Algorithm) -> FloatArray:
    """What an advantage's function gave, as float32. counts: [N], or [T], where it is trained on.

    Raises MegarlError where it has another shape, or a number that counts is not finite.
    """
    array = np.asarray(result, np.float32)
    if array.shape != counts.shape:
        raise MegarlError(
            f"algorithm.advantage: {algorithm.advantage} gave an array of shape {array.shape}; {counts.shape} is needed: one "
            "number for each token where it asks for inputs of tokens, else one for each sample."
        )
    bad = np.flatnonzero(counts & ~np.isfinite(array))
    if len(bad):
        raise MegarlError(
            f"algorithm.advantage: {algorithm.advantage} gave {len(bad)} of {counts.sum()} numbers that are not finite; number "
            f"{bad[0]} is {array[bad[0]]}. A deviation that it divides by is 0 where all rewards are equal: add a little to it."
        )
    return array


@dataclass(frozen=True)
class _Turn:
    """What stays at the collector between the two turns: all [T]."""

    at: Sequences
    old_logprobs: FloatArray
    advantages: FloatArray | None = None  # of tokens, not yet whitened
    returns: FloatArray | None = None
    first_turns: IntArray | None = None  # [n] of sequences
    moved: FloatArray | float = 0.0  # rewards, from the last token to those that ended the turns of an episode


class LocalAdvantages:
    """One collector's part. Steps come one at a time: `measure`, then `finish`."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._asked = asked(recipe.algorithm, "look")
        # A function of tokens; None where there is one number a sample, or nobody asks for advantages.
        function = before_whitening(recipe.algorithm)[0] if self._asked.advantages else None
        self._function = function if function is not None and is_per_token(function) else None
        self._turn: _Turn | None = None

    def measure(
        self,
        samples: SampleNumbers,
        blocks: Sequence[Block],
        columns: FlatColumns,
    ) -> Measured:
        """The first turn; the step stays at hand for `finish`. A step measured before and not finished is forgotten.

        samples: of those of the step that are here; each is in one block. blocks: this collector's of each shard, empty
        ones too. columns: those of the roles (old_logprobs, ref_logprobs, values, teacher_logprobs, scores), where there
        are some.

        What is trained is what the blocks' masks say; a response's mask may have holes.
        Raises MegarlError where a critic has to learn returns and the advantage gives none.
        """
        at = Sequences(blocks)
        assert len(samples.rewards) == len(at.sample_index), (len(samples.rewards), len(at.sample_index))
        flat = {name: at.flat(column) for name, column in columns.items()}
        flat.setdefault("old_logprobs", at.rollout_logprobs)
        found: dict[str, Any] = {}
        moved = moved_to_turns(at, blocks) if by_turn(self._recipe) else 0.0
        turn = _Turn(at, flat["old_logprobs"], first_turns=first_turns(blocks), moved=moved)
        if self._recipe.algorithm.max_logprob_diff is not None:
            found["logprob_diff"] = at.sums(np.abs(flat["old_logprobs"] - at.rollout_logprobs))
        if self._asked.advantages:
            per_token = self._token_rewards(at, flat, columns, samples.kl_coef, found)
            if self._function is None:
                found["token_rewards"] = at.sums(per_token).astype(np.float32)
            else:
                turn = self._of_tokens(turn, samples, per_token, flat, found)
        self._turn = turn
        return Measured(at.sample_index, int((at.mask > 0).sum()), samples.kl_coef, **found)

    def finish(self, settled: Settled) -> Learned:
        """The second turn, of the step that was measured last. Raises MegarlError where none was."""
        turn, self._turn = self._turn, None
        if turn is None:
            raise MegarlError("There is no step to finish: measure one first, and finish it once.")
        at, made = turn.at, {"old_logprobs": turn.old_logprobs}
        if turn.returns is not None:
            made["returns"] = turn.returns
        if self._asked.advantages:
            made["advantages"] = _advantages(turn, settled, self._recipe.algorithm.advantage_clip)
        sums, chosen = WeightSums(), self._recipe.algorithm.correction
        if chosen is not None:
            done = _corrected(chosen, at, turn.old_logprobs)
            made["advantages"] = made["advantages"] * done.weights
            sums = importance.weight_sums(done, at.mask)
        return Learned({name: at.by_shard(made[name]) for name in column_names(self._recipe)}, sums)

    def _token_rewards(
        self,
        at: Sequences,
        flat: Mapping[str, FloatArray],
        columns: FlatColumns,
        kl_coef: float,
        found: dict[str, Any],
    ) -> FloatArray:
        """What tokens are rewarded with, less what their KL costs: [T]. Sample's scores and KL are written down."""
        algorithm, model = self._recipe.algorithm, self._recipe.reward_model
        rewards = np.zeros(len(at.mask), np.float32)
        if model is not None:
            found["scores"] = at.at_ends(columns["scores"])
            if model.level == "token":
                rewards = np.float32(model.weight) * at.after_label(columns["scores"])
        if algorithm.kl_in != "reward" or algorithm.kl_coef == 0 or not self._asked.token_rewards:
            return rewards
        kl = kl_penalty(flat["old_logprobs"], flat["ref_logprobs"], algorithm.kl_kind) * (at.mask > 0)
        found["kl"] = at.sums(kl)
        return rewards - (kl_coef * kl).astype(np.float32)

    def _of_tokens(
        self,
        turn: _Turn,
        samples: SampleNumbers,
        per_token: FloatArray,
        flat: Mapping[str, FloatArray],
        found: dict[str, Any],
    ) -> _Turn:
        """With advantages of tokens, and returns. per_token: rewards of tokens [T], beside those of samples."""
        at, algorithm, function = turn.at, self._recipe.algorithm, self._function
        assert function is not None, "nobody asked for advantages of tokens"
        scores = found.get("scores", NO_NUMBERS)
        rewards = sample_rewards(self._recipe, samples.rewards, samples.response_tokens, scores)
        # Numbers of samples are in the order of the sequences: number i is of the tokens from cu_seqlens[i] on. What is read
        # again below is copied: a function may work in its arrays.
        read = {"logprobs": flat["old_logprobs"], **{name: flat[name] for name in _ROLES if name in flat}}
        given = {
            "rewards": at.by_sequence(rewards),
            "group_index": at.by_sequence(samples.group_index),
            "lengths": trained(at.mask, at.cu_seqlens).counts,
            "mean_nll": at.by_sequence(samples.mean_nll),
            "truncated": at.by_sequence(samples.truncated),
            "reward_parts": at.by_sequence(samples.reward_parts),
            "greedy_rewards": samples.greedy_rewards,
            "token_rewards": token_rewards(at.by_sequence(rewards), at.mask, at.cu_seqlens) + per_token + turn.moved,
            "mask": at.mask.astype(np.float32),
            "cu_seqlens": at.cu_seqlens.copy(),
            "sequence_groups": at.by_sequence(samples.group_index),
            "first_turns": turn.first_turns,
            **{name: column.copy() for name, column in read.items() if name in self._asked.advantage},
            **graders_of(self._recipe),
            **settings(algorithm),
        }
        result = call(function, given)
        both = isinstance(result, AdvantagesAndReturns)
        trained_here = at.mask > 0
        advantages = checked(result.advantages if both else result, trained_here, algorithm)
        returns = checked(result.returns, trained_here, algorithm) if both else None
        if before_whitening(algorithm)[1]:
            found["unwhitened"] = moments(advantages[trained_here])
        if self._recipe.critic is not None:
            if returns is None:
                raise MegarlError(
                    f"algorithm.advantage: {algorithm.advantage} gave no returns, which the critic learns. "
                    "Return megarl.algorithms.returns.AdvantagesAndReturns, or remove the section `critic`."
                )
            target = returns[trained_here].astype(np.float64)
            found["residuals"], found["returns"] = moments(target - flat["values"][trained_here]), moments(target)
        return _Turn(at, turn.old_logprobs, advantages, returns)


def _advantages(turn: _Turn, settled: Settled, most: float | None) -> FloatArray:
    """[T], before the correction. most: they are cut to [-most, most]."""
    found = turn.advantages
    if found is None:
        assert settled.advantages is not None, "the coordinator gave no advantages of samples"
        found = turn.at.spread(settled.advantages)
    elif settled.over is not None:
        found = whiten(found, turn.at.mask, over=settled.over)
    return found if most is None else found.clip(-most, most)


def _corrected(chosen: Correction, at: Sequences, old_logprobs: FloatArray) -> importance.Correction:
    """Importance weights between rollout and trainer, [T]."""

    def made(kind: str, bounds: Correction | RejectBounds) -> importance.Correction:
        ratios = importance.importance_ratios(old_logprobs, at.rollout_logprobs, at.mask, at.cu_seqlens, bounds.level)
        given = {"ratios": ratios, "min_ratio": bounds.low, "max_ratio": bounds.high}
        done: importance.Correction = call(
            importance.CORRECTIONS[kind], given | {"mask": at.mask, "cu_seqlens": at.cu_seqlens}
        )
        return done

    done = made(chosen.kind, chosen)
    return done if chosen.reject is None else importance.both(done, made("reject", chosen.reject))
