"""What a step is learned from, by hand, with its two groups in one collector and in two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.algorithms.advantage import rloo_advantages
from megarl.algorithms.returns import AdvantagesAndReturns, gae
from megarl.core.errors import MegarlError
from megarl.core.types import Block, FloatArray, Status
from megarl.recipe.algorithm import Algorithm, Correction, KlControl, RejectBounds
from megarl.recipe.functions import needs_one_collector
from megarl.recipe.reward import Reward
from megarl.recipe.roles import Critic, RewardModel, Teacher
from megarl.rollout.local_advantages import LocalAdvantages, column_names
from megarl.rollout.step_advantages import StepAdvantages
from tests.rollout.samples import make_prompt, make_sample
from tests.rollout.steps import Step, block_of, facts_of, learn, numbers_of, recipe_of

# Two groups of two: prompts of 2 tokens, responses of 3, 1, 2 and 2. The collector of each, and its shard.
RESPONSES, REWARDS = (3, 1, 2, 2), (1.0, 0.0, 0.0, 0.5)
SHARDS, PLACES = (0, 1, 1, 0), {1: (0, 0, 0, 0), 2: (0, 0, 1, 1), 3: (2, 2, 0, 0)}
NO_GREEDY = np.zeros(0, np.float32)
Said = Mapping[str, Callable[[int, int], float]]  # name -> what is said of a sample's position
anywhere = pytest.mark.parametrize("num_collectors", PLACES)


def step_of(said: Said, num_collectors: int = 1, greedy: FloatArray = NO_GREEDY) -> Step:
    samples = [
        replace(
            make_sample(f"1/p{index // 2}", reward),
            prompt=replace(make_prompt("p0"), token_ids=np.array([8, 9])),
            response_ids=np.arange(length),
            loss_mask=np.ones(length, np.uint8),
            rollout_logprobs=np.full(length, -1, np.float32),
        )
        for index, (length, reward) in enumerate(zip(RESPONSES, REWARDS, strict=True))
    ]
    columns = {
        name: [
            np.array([value(index, at) for at in range(2 + length)], np.float32)
            for index, length in enumerate(RESPONSES)
        ]
        for name, value in said.items()
    }
    return Step(samples, np.array(SHARDS), np.array(PLACES[num_collectors]), columns, greedy, 2, num_collectors)


def trained(step: Step, column: Mapping[int, FloatArray]) -> dict[int, list[float]]:
    """Sample -> its trained positions; everything else must be 0."""
    found = {}
    for index, values in sorted(column.items()):
        mask = np.concatenate([[0], step.samples[index].loss_mask, [0]]) > 0
        assert not values[~mask].any()
        found[index] = values[mask].tolist()
    return found


def learned(
    algorithm: Algorithm,
    num_collectors: int = 1,
    columns: Said | None = None,
    *,
    greedy: FloatArray = NO_GREEDY,
    change: Callable[[Step], Step] = lambda step: step,
    **sections: Any,
) -> tuple[dict[str, dict[int, list[float]]], dict[str, float]]:
    """Columns by name and sample, and metrics. columns: beside old log-probs of -1."""
    step = change(step_of({"old_logprobs": lambda *_: -1.0, **(columns or {})}, num_collectors, greedy))
    recipe = recipe_of(algorithm, **sections)
    found, metrics = learn(StepAdvantages(recipe), recipe, step, list(step.said))
    assert tuple(found) == column_names(recipe)
    return {name: trained(step, column) for name, column in found.items()}, metrics


@anywhere
def test_one_number_a_sample_is_spread_over_its_tokens(num_collectors: int) -> None:
    found, metrics = learned(Algorithm(advantage="rloo"), num_collectors)
    assert found == {"advantages": {0: [1.0] * 3, 1: [-1.0], 2: [-0.5] * 2, 3: [0.5] * 2}}
    assert metrics == {}


@anywhere
def test_gae_by_hand_with_its_returns_and_without_whitening(num_collectors: int) -> None:
    # Of sample 0: rewards 0, 0, 1; values 0.5, 0.25, 0 (at positions 1, 2, 3 of its 5); gamma 1, lambda 0.5.
    values = {1: 0.5, 2: 0.25, 3: 0.0}
    found, metrics = learned(
        Algorithm(advantage="gae", lam=0.5, whiten=False),
        num_collectors,
        {"values": lambda sample, at: values.get(at, 9.0) if sample == 0 else 0.0},
        critic=Critic(),
    )
    # delta = -0.25, -0.25, 1; A_2 = 1, A_1 = -0.25 + 0.5 = 0.25, A_0 = -0.25 + 0.125.
    assert found["advantages"][0] == [-0.125, 0.25, 1.0]
    assert found["returns"][0] == [0.375, 0.5, 1.0]
    assert found["advantages"][3] == [0.25, 0.5]
    returns = np.array([0.375, 0.5, 1, 0, 0, 0, 0.25, 0.5])
    residuals = returns - [0.5, 0.25, 0, 0, 0, 0, 0, 0]
    assert metrics == {"critic/explained_variance": pytest.approx(1 - residuals.var() / returns.var())}


@anywhere
def test_turns_are_compared_within_their_groups(num_collectors: int) -> None:
    """Of sample 0 the second of three tokens is not its own: it has two turns, and nobody else has a second one."""

    def in_turns(step: Step) -> Step:
        first = replace(step.samples[0], loss_mask=np.array([1, 0, 1], np.uint8))
        return replace(step, samples=[first, *step.samples[1:]])

    algorithm = Algorithm(advantage="grpo_turns", normalize_std=False)
    found, _ = learned(algorithm, num_collectors, change=in_turns)
    assert found == {"advantages": {0: [0.5, 0.0], 1: [-0.5], 2: [-0.25] * 2, 3: [0.25] * 2}}


@anywhere
def test_whitening_is_over_the_whole_step(num_collectors: int) -> None:
    values: Said = {"values": lambda sample, at: 0.1 * sample}
    plain, _ = learned(Algorithm(advantage="gae", whiten=False), num_collectors, values, critic=Critic())
    white, _ = learned(Algorithm(advantage="gae"), num_collectors, values, critic=Critic())
    before = np.concatenate([*plain["advantages"].values()])
    expected = (before - before.mean()) / before.std()
    assert np.concatenate([*white["advantages"].values()]) == pytest.approx(expected, abs=1e-6)


@anywhere
@pytest.mark.parametrize("advantage", ["rloo", f"{__name__}:own_of_rloo"])
def test_advantages_of_samples_are_whitened_over_their_trained_tokens(num_collectors: int, advantage: str) -> None:
    """RLOO's are 1 at three tokens, -1 at one, -0.5 and 0.5 at two each: of mean 0.25 and deviation 0.75."""
    found, _ = learned(Algorithm(advantage=advantage, whiten=True), num_collectors)
    expected = {0: [1.0] * 3, 1: [-5 / 3], 2: [-1.0] * 2, 3: [1 / 3] * 2}
    assert found["advantages"] == {sample: pytest.approx(values, abs=1e-6) for sample, values in expected.items()}


@anywhere
def test_other_advantages_of_tokens_are_whitened_too(num_collectors: int) -> None:
    """By turns, which are one each here, GRPO's are 0.5, -0.5, -0.25 and 0.25: half of RLOO's."""
    algorithm = Algorithm(advantage="grpo_turns", normalize_std=False, whiten=True)
    expected = {0: [1.0] * 3, 1: [-5 / 3], 2: [-1.0] * 2, 3: [1 / 3] * 2}
    found, _ = learned(algorithm, num_collectors)
    assert found["advantages"] == {sample: pytest.approx(values, abs=1e-6) for sample, values in expected.items()}


def untrained(step: Step) -> Step:
    nothing = replace(step.samples[0], loss_mask=np.zeros(3, np.uint8))
    return replace(step, samples=[nothing, *step.samples[1:]])


@anywhere
def test_a_sample_without_a_trained_token_is_in_no_mean(num_collectors: int) -> None:
    """Without the first: -1, -0.5, -0.5, 0.5, 0.5, of mean -0.2 and variance 0.36."""

    found, _ = learned(Algorithm(advantage="rloo", whiten=True), num_collectors, change=untrained)
    expected = {0: [], 1: [-0.8 / 0.6], 2: [-0.3 / 0.6] * 2, 3: [0.7 / 0.6] * 2}
    assert found["advantages"] == {sample: pytest.approx(values, abs=1e-6) for sample, values in expected.items()}


@anywhere
def test_advantages_are_cut_after_whitening_and_before_they_are_weighed(num_collectors: int) -> None:
    said: Said = {"old_logprobs": lambda sample, at: 0.0 if sample == 0 else -1.0}  # a ratio of e, cut to 1.5
    algorithm = Algorithm(
        advantage="rloo", whiten=True, advantage_clip=0.75, correction=Correction(kind="truncate", high=1.5)
    )
    found, _ = learned(algorithm, num_collectors, said)
    expected = {0: [0.75 * 1.5] * 3, 1: [-0.75], 2: [-0.75] * 2, 3: [1 / 3] * 2}
    assert found["advantages"] == {sample: pytest.approx(values, abs=1e-6) for sample, values in expected.items()}
    values: Said = {"values": lambda *_: 0.0}
    plain, _ = learned(
        Algorithm(advantage="gae", lam=1.0, whiten=False, advantage_clip=0.75), 1, values, critic=Critic()
    )
    assert plain["advantages"][0] == [0.75] * 3 and plain["advantages"][3] == [0.5] * 2
    assert plain["returns"][0] == [1.0] * 3  # what a critic learns is not cut


@anywhere
def test_reinforce_pp_is_whitened_whatever_the_recipe_says_of_whitening(num_collectors: int) -> None:
    # Returns: 1 at the three tokens of sample 0, 0 at three, 0.5 at two: of mean 0.5 and variance 1.5 / 8.
    found, _ = learned(Algorithm(advantage="reinforce_pp", whiten=False), num_collectors)
    step = (1.5 / 8) ** -0.5 / 2
    expected = {0: [step] * 3, 1: [-step], 2: [-step] * 2, 3: [0.0] * 2}
    assert found["advantages"] == {sample: pytest.approx(values, abs=1e-6) for sample, values in expected.items()}


@anywhere
def test_advantages_that_are_equal_over_the_step_whiten_to_exactly_0(num_collectors: int) -> None:
    def equal(step: Step) -> Step:
        return replace(step, samples=[replace(sample, reward=1 / 3) for sample in step.samples])

    found, _ = learned(Algorithm(advantage="reinforce_pp"), num_collectors, change=equal)
    assert not any(map(any, found["advantages"].values()))


@anywhere
def test_a_kl_in_the_reward_costs_at_each_token(num_collectors: int) -> None:
    algorithm = Algorithm(advantage="gae", whiten=False, lam=1.0, kl_coef=0.5, kl_in="reward", kl_kind="k1")
    said: Said = {"ref_logprobs": lambda *_: -1.5, "values": lambda *_: 0.0}
    found, metrics = learned(algorithm, num_collectors, said, critic=Critic())
    # log-probs -1, reference -1.5: k1 is 0.5 a token, which costs 0.25.
    assert found["advantages"][0] == [0.25, 0.5, 0.75]
    assert metrics["reward/kl"] == 0.5 and metrics["reward/kl_coef"] == 0.5


@anywhere
def test_with_one_number_a_sample_the_kl_of_its_tokens_comes_off_the_reward(num_collectors: int) -> None:
    algorithm = Algorithm(advantage="rloo", kl_coef=0.5, kl_in="reward", kl_kind="k1")
    found, _ = learned(algorithm, num_collectors, {"ref_logprobs": lambda *_: -1.5})
    # Sample 0: 1 - 3 x 0.25; sample 1: 0 - 0.25.
    assert found["advantages"][0] == [0.5] * 3 and found["advantages"][1] == [-0.5]


@anywhere
def test_masked_tokens_inside_of_a_response_neither_cost_nor_count(num_collectors: int) -> None:
    def with_a_hole(step: Step) -> Step:
        [first, *others] = step.samples
        return replace(step, samples=[replace(first, loss_mask=np.array([0, 1, 1], np.uint8)), *others])

    algorithm = Algorithm(advantage="rloo", kl_coef=0.5, kl_in="reward", kl_kind="k1")
    # Where nothing is trained the reference is far away.
    said: Said = {"ref_logprobs": lambda sample, at: -9.0 if (sample, at) == (0, 1) else -1.5}
    found, metrics = learned(algorithm, num_collectors, said, change=with_a_hole)
    # Sample 0: 1 - 2 x 0.25; sample 1: 0 - 0.25.
    assert found["advantages"][0] == [0.75] * 2 and found["advantages"][1] == [-0.75]
    assert metrics["reward/kl"] == 0.5


def test_the_kls_weight_stays_while_the_critic_alone_learns() -> None:
    steered = KlControl(target=0.25, horizon=40)
    algorithm = Algorithm(advantage="gae", kl_coef=0.5, kl_in="reward", kl_kind="k1", kl_control=steered)
    recipe = recipe_of(algorithm, critic=Critic(warmup_steps=2))
    local, maker, step = LocalAdvantages(recipe), StepAdvantages(recipe), step_of({})
    nothing = [np.zeros(len(step.samples) * 2 + sum(RESPONSES), np.float32)]
    columns = dict.fromkeys(("old_logprobs", "ref_logprobs", "values"), nothing)
    measured = local.measure(numbers_of(step, range(4), maker.kl_coef), [block_of(step, range(4))], columns)
    weights = []
    for number in (1, 2, 3):
        maker.settle(replace(facts_of(step), step=number), [measured])
        weights.append(maker.kl_coef)
    assert weights == [0.5, 0.5, pytest.approx(0.5 * (1 - 0.2 * 4 / 40))]


@anywhere
def test_the_kls_weight_stays_in_a_step_that_is_left_out(num_collectors: int) -> None:
    """The rollout's log-probs are -1: what is too far from the trainer's was sampled by something else than the policy."""
    section = {"advantage": "rloo", "kl_coef": 0.5, "kl_in": "reward", "kl_control": {"target": 0.25, "horizon": 40}}
    algorithm = Algorithm.model_validate({**section, "max_logprob_diff": 0.5, "on_logprob_diff": "skip"})
    for old, after in ((-1.25, 0.5 * (1 + 0.2 * 4 / 40)), (-2.0, 0.5)):
        maker = StepAdvantages(recipe := recipe_of(algorithm))
        said: Said = {"old_logprobs": lambda *_, old=old: old, "ref_logprobs": lambda *_: -9.0}  # type: ignore[misc]
        _, metrics = learn(maker, recipe, step_of(said, num_collectors), list(said))
        assert metrics["rollout/drifted"] == (old == -2)
        assert maker.kl_coef == pytest.approx(after)


@anywhere
def test_the_kls_weight_stays_where_no_token_is_trained_on(num_collectors: int) -> None:
    """All samples are masked: that is no KL of 0, which would lower the weight."""
    steered = KlControl(target=0.25, horizon=40)
    recipe = recipe_of(Algorithm(advantage="rloo", kl_coef=0.5, kl_in="reward", kl_control=steered))
    maker = StepAdvantages(recipe)
    said: Said = {"old_logprobs": lambda *_: -1.0, "ref_logprobs": lambda *_: -2.0}
    step = step_of(said, num_collectors)
    masked = [replace(sample, loss_mask=np.zeros_like(sample.loss_mask)) for sample in step.samples]
    _, metrics = learn(maker, recipe, replace(step, samples=masked), list(said))
    assert metrics == {}
    assert maker.kl_coef == 0.5


@anywhere
def test_the_kls_weight_is_steered_and_saved(num_collectors: int) -> None:
    steered = KlControl(target=0.25, horizon=40)
    algorithm = Algorithm(advantage="rloo", kl_coef=0.5, kl_in="reward", kl_kind="k1", kl_control=steered)
    recipe = recipe_of(algorithm)
    maker = StepAdvantages(recipe)
    said: Said = {"old_logprobs": lambda *_: -1.0, "ref_logprobs": lambda *_: -2.0}
    _, metrics = learn(maker, recipe, step_of(said, num_collectors), list(said))
    # The KL is far over its target: the error is cut at 0.2, and 4 of 40 samples have passed.
    after = 0.5 * (1 + 0.2 * 4 / 40)
    assert metrics == {"reward/kl": 1.0, "reward/kl_coef": 0.5}  # of this step, not of the next
    assert maker.kl_coef == pytest.approx(after)
    other = StepAdvantages(recipe)
    other.load_state(maker.state())
    assert other.state() == maker.state() == {"kl_coef": maker.kl_coef}
    _, metrics = learn(other, recipe, step_of(said, num_collectors), list(said))
    assert metrics["reward/kl_coef"] == pytest.approx(after)
    fixed = StepAdvantages(recipe_of(Algorithm(kl_coef=0.1, kl_in="reward")))
    fixed.load_state(maker.state())
    assert fixed.state() == {"kl_coef": 0.1}  # a weight that stays is the recipe's


@anywhere
@pytest.mark.parametrize(("level", "expected"), [("sequence", 2.0), ("token", 3.0)])
def test_a_reward_models_score_joins_the_graders(num_collectors: int, level: Any, expected: float) -> None:
    # It says 1 at each token and 2 at the last of sample 0, 0 elsewhere; it counts half.
    def score(sample: int, at: int) -> float:
        return 0.0 if sample else (2.0 if at == 4 else 1.0)

    model = RewardModel(path=Path("r"), weight=0.5, level=level)
    found, metrics = learned(Algorithm(advantage="rloo"), num_collectors, {"scores": score}, reward_model=model)
    # sequence: 1 + 0.5 x 2 against 0. token: the score after each of its 3 tokens, 1 + 0.5 (1 + 1 + 2) against 0.
    assert found["advantages"][0] == [expected] * 3
    assert metrics == {"reward/model_score": 0.5}


@anywhere
def test_tokens_of_a_reward_model_are_rewarded_where_they_stand(num_collectors: int) -> None:
    found, _ = learned(
        Algorithm(advantage="gae", whiten=False, lam=1.0),
        num_collectors,
        {"scores": lambda sample, at: float(at), "values": lambda *_: 0.0},
        critic=Critic(),
        reward_model=RewardModel(path=Path("r"), level="token"),
    )
    # Sample 3 has tokens 2 and 3, scored 2 and 3, and a reward of 0.5 at its end.
    assert found["returns"][3] == [5.5, 3.5]


@anywhere
def test_importance_weights_multiply_the_advantages(num_collectors: int) -> None:
    # Ratio e in the 3 tokens of sample 0, which is cut to 1.5; 1 in the 5 others.
    said: Said = {"old_logprobs": lambda sample, at: 0.0 if sample == 0 else -1.0}
    correction = Correction(kind="truncate", high=1.5)
    found, metrics = learned(Algorithm(advantage="rloo", correction=correction), num_collectors, said)
    assert found == {"advantages": {0: [1.5] * 3, 1: [-1.0], 2: [-0.5] * 2, 3: [0.5] * 2}}
    assert metrics["rollout/correction_touched"] == 3 / 8
    assert metrics["rollout/correction_ess"] == pytest.approx(9.5**2 / (8 * 11.75))


@anywhere
def test_a_rejected_sequence_is_not_learned_from(num_collectors: int) -> None:
    found, _ = learned(
        Algorithm(advantage="rloo", correction=Correction(kind="reject", level="token")),
        num_collectors,
        {"old_logprobs": lambda sample, at: 4.0 if (sample, at) == (0, 2) else -1.0},
    )
    assert found["advantages"][0] == [0.0] * 3 and found["advantages"][1] == [-1.0]


@anywhere
def test_a_sequence_is_rejected_by_another_ratio_than_its_tokens_are_weighed_by(num_collectors: int) -> None:
    # Sample 0: ratio e in one token of 3, which is cut to 1.5, and e^(1/3) in the mean. Sample 3: e in both, rejected.
    reject = RejectBounds(level="geometric", high=2.0)
    found, metrics = learned(
        Algorithm(advantage="rloo", correction=Correction(kind="truncate", high=1.5, reject=reject)),
        num_collectors,
        {"old_logprobs": lambda sample, at: 0.0 if sample == 3 or (sample, at) == (0, 2) else -1.0},
    )
    assert sorted(found["advantages"][0]) == [1.0, 1.0, 1.5]
    assert found["advantages"][3] == [0.0, 0.0]
    assert found["advantages"][1] == [-1.0]
    assert metrics["rollout/correction_touched"] == 3 / 8


@anywhere
def test_the_rollouts_own_log_probs_stand_in(num_collectors: int) -> None:
    step = step_of({}, num_collectors)
    recipe = recipe_of(Algorithm(advantage="rloo", old_logprobs="rollout"))
    found, _ = learn(StepAdvantages(recipe), recipe, step, [])
    assert tuple(found) == column_names(recipe) == ("advantages", "old_logprobs")
    assert trained(step, found["old_logprobs"])[0] == step.samples[0].rollout_logprobs.tolist()


@anywhere
def test_remax_compares_with_the_greedy_answer(num_collectors: int) -> None:
    greedy = np.array([0.5, 1.0], np.float32)
    found, _ = learned(Algorithm(advantage="remax"), num_collectors, greedy=greedy)
    assert found["advantages"] == {0: [0.5] * 3, 1: [-0.5], 2: [-1.0] * 2, 3: [-0.5] * 2}
    assert StepAdvantages(recipe_of(Algorithm(advantage="remax"))).needs_greedy
    assert not StepAdvantages(recipe_of(Algorithm())).needs_greedy


@anywhere
def test_a_loss_that_asks_for_no_advantages_gets_none(num_collectors: int) -> None:
    teacher = Teacher(path=Path("t"))
    found, metrics = learned(Algorithm(policy_loss="distill"), num_collectors, teacher=teacher)
    assert found == {} and metrics == {}


def own_advantages(
    token_rewards: Any, rewards: Any, mask: Any, group_index: Any, lengths: Any, greedy_rewards: Any, scale: float
) -> Any:
    """A function as a user would write it: per token, with what is known of samples too, and a setting."""
    order = [index for shard in (0, 1) for index, at in enumerate(SHARDS) if at == shard]
    assert rewards.tolist() == [REWARDS[index] for index in order]
    assert lengths.tolist() == [RESPONSES[index] for index in order]
    assert group_index.tolist() == [index // 2 for index in order] and greedy_rewards.tolist() == [0.5, 1.0]
    return scale * token_rewards


def own_of_sequences(rewards: Any, mean_nll: Any, mask: Any, cu_seqlens: Any) -> Any:
    """Each sequence's reward and its mean_nll at its tokens."""
    return np.repeat(rewards + 100 * mean_nll, np.diff(cu_seqlens)) * mask


def own_in_place(logprobs: Any, ref_logprobs: Any, values: Any, cu_seqlens: Any) -> Any:
    """Works in the arrays that it is given."""
    logprobs -= ref_logprobs
    values[:] = 0
    ref_logprobs[:] = 0
    return AdvantagesAndReturns(logprobs, logprobs)


def own_returns(token_rewards: Any, values: Any, mask: Any, cu_seqlens: Any) -> AdvantagesAndReturns:
    """With returns, for a critic."""
    return gae(token_rewards, values, mask, cu_seqlens)


def own_of_samples(rewards: Any, lengths: Any) -> Any:
    return rewards * lengths


def own_of_rloo(rewards: Any, group_index: Any) -> Any:
    return rloo_advantages(rewards, group_index)


def own_of_truncated(rewards: Any, truncated: Any) -> Any:
    """What was cut off is bad, whatever it earned."""
    return np.where(truncated, -1, rewards * 0)


def own_of_truncated_at_tokens(truncated: Any, mask: Any, cu_seqlens: Any) -> Any:
    return -np.repeat(truncated.astype(np.float32), np.diff(cu_seqlens)) * mask


def too_short(rewards: Any) -> Any:
    return rewards[1:]


def too_short_by_tokens(mask: Any) -> Any:
    return mask[1:]


def test_a_users_function_of_tokens_sees_the_whole_step_in_one_collector() -> None:
    algorithm = Algorithm(advantage=f"{__name__}:own_advantages", settings={"scale": 4.0})
    greedy = np.array([0.5, 1.0], np.float32)
    found, _ = learned(algorithm, greedy=greedy)
    assert found["advantages"] == {0: [0.0, 0.0, 4.0], 1: [0.0], 2: [0.0, 0.0], 3: [0.0, 2.0]}
    values: Said = {"values": lambda *_: 0.0}
    with pytest.raises(MegarlError, match=r"gave no returns, which the critic learns"):
        learned(algorithm, columns=values, greedy=greedy, critic=Critic())
    made, _ = learned(Algorithm(advantage=f"{__name__}:own_returns"), columns=values, critic=Critic())
    assert made["returns"][3] == [0.5, 0.5]


def test_a_users_function_of_tokens_has_what_is_of_samples_in_the_order_of_the_sequences() -> None:
    def surer(step: Step) -> Step:
        samples = [
            replace(sample, rollout_logprobs=np.full(len(sample.response_ids), -index, np.float32))
            for index, sample in enumerate(step.samples)
        ]
        return replace(step, samples=samples)

    found, _ = learned(Algorithm(advantage=f"{__name__}:own_of_sequences"), change=surer)
    assert found["advantages"] == {
        index: [reward + 100.0 * index] * length
        for index, (reward, length) in enumerate(zip(REWARDS, RESPONSES, strict=True))
    }


def test_what_a_users_function_does_to_its_inputs_changes_nothing_else() -> None:
    """Old log-probs of -1 are twice the rollout's: each ratio is the same whatever the function does."""
    said: Said = {"ref_logprobs": lambda *_: -3.0, "values": lambda *_: 0.5}
    correction = Correction(kind="truncate", level="token", high=100.0)
    algorithm = Algorithm(advantage=f"{__name__}:own_in_place", kl_coef=0.1, correction=correction)
    found, metrics = learned(algorithm, columns=said, critic=Critic())
    assert found["advantages"][0] == [2.0] * 3 and found["returns"][0] == [2.0] * 3
    assert metrics["rollout/correction_touched"] == 0.0
    algorithm = Algorithm(advantage=f"{__name__}:own_in_place", kl_coef=0.1, old_logprobs="rollout")
    assert learned(algorithm, columns=said, critic=Critic())[0]["old_logprobs"][0] == [-1.0] * 3


@anywhere
def test_a_users_function_of_samples_sees_the_whole_step(num_collectors: int) -> None:
    found, _ = learned(Algorithm(advantage=f"{__name__}:own_of_samples"), num_collectors)
    assert found["advantages"] == {0: [3.0] * 3, 1: [0.0], 2: [0.0] * 2, 3: [1.0] * 2}


def scored(step: Step) -> Step:
    """In both groups one sample is right and the other has style; nobody looked at the style of the last."""
    parts: list[dict[str, float | None]] = [
        {"right": 1, "style": 0},
        {"right": 0, "style": 3},
        {"right": 1, "style": 2},
        {"right": 0},
    ]
    return replace(
        step, samples=[replace(sample, reward_parts=each) for sample, each in zip(step.samples, parts, strict=True)]
    )


TWO_GRADERS = Reward.model_validate(
    {"graders": {"style": {"kind": "rule", "fn": "exact", "weight": 0.5}, "right": {"kind": "rule", "fn": "math"}}}
)


@anywhere
def test_gdpo_normalises_each_graders_scores_for_themselves(num_collectors: int) -> None:
    """Sums of 0.5, -0.5, 1 and -1: of mean 0 and variance 2.5 / 4, each sample counting once."""
    found, _ = learned(Algorithm(advantage="gdpo"), num_collectors, change=scored, reward=TWO_GRADERS)
    unit = (2.5 / 4) ** -0.5
    expected = {0: [0.5 * unit] * 3, 1: [-0.5 * unit], 2: [unit] * 2, 3: [-unit] * 2}
    assert found["advantages"] == {sample: pytest.approx(values, rel=1e-5) for sample, values in expected.items()}


def own_of_parts(reward_parts: Any, reward_weights: Any, reward_names: Any) -> Any:
    assert reward_names == ["style", "right"] and reward_weights.tolist() == [0.5, 1]
    return np.nansum(reward_parts * reward_weights, axis=1)


def own_of_parts_at_tokens(reward_parts: Any, reward_weights: Any, mask: Any, cu_seqlens: Any) -> Any:
    return np.repeat(np.nansum(reward_parts * reward_weights, axis=1), np.diff(cu_seqlens)) * mask


@pytest.mark.parametrize("name", ["own_of_parts", "own_of_parts_at_tokens"])
def test_a_users_function_may_ask_for_each_graders_scores(name: str) -> None:
    algorithm = Algorithm(advantage=f"{__name__}:{name}")
    found, _ = learned(algorithm, change=scored, reward=TWO_GRADERS)
    assert found["advantages"] == {0: [1.0] * 3, 1: [1.5], 2: [2.0] * 2, 3: [0.0] * 2}


@anywhere
@pytest.mark.parametrize("name", ["own_of_truncated", "own_of_truncated_at_tokens"])
def test_a_users_function_may_ask_which_samples_were_cut_off(num_collectors: int, name: str) -> None:
    def cut_off(step: Step) -> Step:
        samples = [
            replace(sample, status=Status.TRUNCATED) if index in (0, 3) else sample
            for index, sample in enumerate(step.samples)
        ]
        return replace(step, samples=samples)

    algorithm = Algorithm(advantage=f"{__name__}:{name}")
    places = 1 if needs_one_collector(algorithm) else num_collectors
    found, _ = learned(algorithm, places, change=cut_off)
    assert found["advantages"] == {0: [-1.0] * 3, 1: [0.0], 2: [0.0] * 2, 3: [-1.0] * 2}


@pytest.mark.parametrize("name", ["too_short", "too_short_by_tokens"])
def test_a_users_function_gives_one_number_for_each(name: str) -> None:
    with pytest.raises(MegarlError, match=rf"{name} gave an array of shape \((3|15),\); \((4|16),\) is needed"):
        learned(Algorithm(advantage=f"{__name__}:{name}"))


@pytest.mark.parametrize(("name", "number"), [("divided_by_nothing", 2), ("divided_by_nothing_at_tokens", 14)])
def test_what_a_users_function_makes_of_a_division_by_zero_is_refused(name: str, number: int) -> None:
    """Of sample 2, or at the last token that is trained on; where nothing is, it does not matter."""

    with pytest.raises(MegarlError, match=rf"{name} gave 1 of \d numbers that are not finite; number {number} is nan"):
        learned(Algorithm(advantage=f"{__name__}:{name}"), change=untrained)


def test_returns_of_a_users_function_have_one_number_for_each_token() -> None:
    with pytest.raises(MegarlError, match=r"too_few_returns gave an array of shape \(15,\); \(16,\) is needed"):
        learned(Algorithm(advantage=f"{__name__}:too_few_returns"), columns={"values": lambda *_: 0.0}, critic=Critic())


def test_only_a_users_function_of_tokens_needs_one_collector() -> None:
    def needs(advantage: str, **keys: Any) -> bool:
        return needs_one_collector(Algorithm(advantage=advantage, **keys))

    assert needs(f"{__name__}:own_advantages") and needs(f"{__name__}:own_returns")
    assert not needs(f"{__name__}:own_of_samples") and not needs("gae") and not needs("reinforce_pp")
    assert not needs(f"{__name__}:own_advantages", policy_loss="distill")  # nobody calls it


def test_turns_come_in_pairs_and_every_sample_once() -> None:
    recipe = recipe_of(Algorithm(advantage="rloo"))
    step, local, maker = step_of({}), LocalAdvantages(recipe), StepAdvantages(recipe)
    blocks = [block_of(step, step.at(shard, 0)) for shard in range(2)]
    measured = local.measure(numbers_of(step, range(len(step.samples)), 0.0), blocks, {})
    with pytest.raises(AssertionError, match="not every sample was measured once"):
        maker.settle(facts_of(step), [measured, measured])
    [settled] = maker.settle(facts_of(step), [measured])
    local.finish(settled)
    with pytest.raises(MegarlError, match="measure one first"):
        local.finish(settled)


def test_an_empty_step_is_none_the_worse() -> None:
    step = replace(step_of({}), samples=[], shard_of=np.zeros(0), collector_of=np.zeros(0))
    assert isinstance(block_of(step, []), Block)
    for advantage in ("rloo", "reinforce_pp"):
        recipe = recipe_of(Algorithm(advantage=advantage, correction=Correction()))
        found, metrics = learn(StepAdvantages(recipe), recipe, step, [])
        assert found == {"advantages": {}}
        assert metrics == {"rollout/correction_ess": 0.0, "rollout/correction_touched": 0.0}


def divided_by_nothing(rewards: FloatArray) -> FloatArray:
    return np.array([np.nan, 0, np.nan, 0], np.float32)


def divided_by_nothing_at_tokens(token_rewards: FloatArray, mask: FloatArray) -> FloatArray:
    wrong = np.where(mask > 0, 0, np.nan).astype(np.float32)
    wrong[np.flatnonzero(mask)[-1]] = np.nan
    return wrong


def too_few_returns(token_rewards: FloatArray) -> AdvantagesAndReturns:
    return AdvantagesAndReturns(token_rewards, token_rewards[:-1])
