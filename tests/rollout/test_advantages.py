"""What a step is learned from, by hand: rewards, KL, values and importance weights on a few tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.algorithms.returns import AdvantagesAndReturns, gae, whiten
from megarl.core.errors import MegarlError
from megarl.core.types import Column, FloatArray, Sample, Shard
from megarl.data.pack import column_like, pack
from megarl.recipe.algorithm import Algorithm, Correction, KlControl
from megarl.recipe.roles import Critic, RewardModel
from megarl.recipe.run import Model
from megarl.recipe.schema import Data, Recipe, Rollout, Train
from megarl.rollout.advantages import Advantages, Learnable, Step
from megarl.rollout.local_advantages import column_names
from tests.rollout.samples import make_prompt, make_sample

# Two groups of two: prompts of 2 tokens, responses of 3, 1, 2 and 2.
RESPONSES, REWARDS = (3, 1, 2, 2), (1.0, 0.0, 0.0, 0.5)
NO_GREEDY = np.zeros(0, np.float32)


def recipe_of(algorithm: Algorithm, **sections: Any) -> Recipe:
    return Recipe(
        model=Model(path=Path("m")),
        data=Data(train=Path("t")),
        rollout=Rollout(prompts_per_step=2, samples_per_prompt=2, max_response_tokens=4),
        train=Train(steps=1),
        algorithm=algorithm,
        **sections,
    )


def step_of(num_shards: int = 1) -> tuple[list[Sample], list[Shard]]:
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
    shards = pack(
        samples,
        num_shards=num_shards,
        mini_batch_samples=4,
        micro_batch_tokens=9,
        reduction="token-mean",
        max_response_tokens=4,
    )
    return samples, shards


def by_position(shards: list[Shard], value: Any) -> list[Column]:
    """A column with value(sample, position in its sequence) everywhere, also outside of the mask."""
    return [
        [
            [
                np.concatenate(
                    [
                        np.array([value(int(sample), at) for at in range(end - start)], np.float32)
                        for sample, start, end in zip(
                            micro.sample_index, micro.cu_seqlens, micro.cu_seqlens[1:], strict=False
                        )
                    ]
                )
                for micro in mini.micro_batches
            ]
            for mini in shard.mini_batches
        ]
        for shard in shards
    ]


def trained(shards: list[Shard], columns: list[Column]) -> dict[int, list[float]]:
    """Sample -> its trained positions; everything else must be 0."""
    found: dict[int, list[float]] = {}
    for shard, column in zip(shards, columns, strict=True):
        for mini, parts in zip(shard.mini_batches, column, strict=True):
            for micro, part in zip(mini.micro_batches, parts, strict=True):
                assert not part[micro.loss_mask == 0].any()
                for sample, start, end in zip(micro.sample_index, micro.cu_seqlens, micro.cu_seqlens[1:], strict=False):
                    if sample >= 0:
                        found[int(sample)] = part[start:end][micro.loss_mask[start:end] > 0].tolist()
    return found


def learn(
    algorithm: Algorithm, num_shards: int = 1, greedy: FloatArray = NO_GREEDY, *, columns: Any = None, **sections: Any
) -> tuple[dict[str, dict[int, list[float]]], Learnable]:
    """Columns by name and sample, and what came with them. columns: name -> value(sample, position)."""
    samples, shards = step_of(num_shards)
    given = {
        name: by_position(shards, value) for name, value in {"old_logprobs": lambda *_: -1.0, **(columns or {})}.items()
    }
    learnable = Advantages(recipe_of(algorithm, **sections)).of_step(samples, shards, given, greedy)
    return {name: trained(shards, column) for name, column in learnable.columns.items()}, learnable


@pytest.mark.parametrize("num_shards", [1, 2])
def test_one_number_a_sample_is_spread_over_its_tokens(num_shards: int) -> None:
    found, _ = learn(Algorithm(advantage="rloo"), num_shards)
    assert found == {"advantages": {0: [1.0] * 3, 1: [-1.0], 2: [-0.5] * 2, 3: [0.5] * 2}}


def test_gae_by_hand_with_its_returns_and_without_whitening() -> None:
    # Of sample 0: rewards 0, 0, 1; values 0.5, 0.25, 0 (at positions 1, 2, 3 of its 5); gamma 1, lambda 0.5.
    values = {1: 0.5, 2: 0.25, 3: 0.0}
    found, learnable = learn(
        Algorithm(advantage="gae", lam=0.5, whiten=False),
        columns={"values": lambda sample, at: values.get(at, 9.0) if sample == 0 else 0.0},
        critic=Critic(),
    )
    # delta = -0.25, -0.25, 1; A_2 = 1, A_1 = -0.25 + 0.5 = 0.25, A_0 = -0.25 + 0.125.
    assert found["advantages"][0] == [-0.125, 0.25, 1.0]
    assert found["returns"][0] == [0.375, 0.5, 1.0]
    assert found["advantages"][3] == [0.25, 0.5]
    assert learnable.metrics["critic/explained_variance"] < 1


def test_whitening_is_over_the_whole_step_whatever_its_shards() -> None:
    algorithm = Algorithm(advantage="gae")
    columns = {"values": lambda sample, at: 0.1 * sample}
    one, _ = learn(algorithm, 1, columns=columns, critic=Critic())
    two, _ = learn(algorithm, 2, columns=columns, critic=Critic())
    assert {k: pytest.approx(v, abs=1e-6) for k, v in one["advantages"].items()} == two["advantages"]
    everything = np.concatenate([*one["advantages"].values()])
    assert everything.mean() == pytest.approx(0, abs=1e-6) and everything.std() == pytest.approx(1, abs=1e-5)


def test_a_kl_in_the_reward_costs_at_each_token() -> None:
    algorithm = Algorithm(advantage="gae", whiten=False, lam=1.0, kl_coef=0.5, kl_in="reward", kl_kind="k1")
    found, learnable = learn(
        algorithm, columns={"ref_logprobs": lambda *_: -1.5, "values": lambda *_: 0.0}, critic=Critic()
    )
    # log-probs -1, reference -1.5: k1 is 0.5 a token, which costs 0.25.
    assert found["advantages"][0] == [0.25, 0.5, 0.75]
    assert learnable.metrics["reward/kl"] == 0.5 and learnable.metrics["reward/kl_coef"] == 0.5


def test_with_one_number_a_sample_the_kl_of_its_tokens_comes_off_the_reward() -> None:
    algorithm = Algorithm(advantage="rloo", kl_coef=0.5, kl_in="reward", kl_kind="k1")
    found, _ = learn(algorithm, columns={"ref_logprobs": lambda *_: -1.5})
    # Sample 0: 1 - 3 x 0.25; sample 1: 0 - 0.25.
    assert found["advantages"][0] == [pytest.approx(0.5)] * 3 and found["advantages"][1] == [pytest.approx(-0.5)]


def test_the_kls_weight_is_steered_and_saved() -> None:
    samples, shards = step_of()
    algorithm = Algorithm(
        advantage="rloo", kl_coef=0.5, kl_in="reward", kl_kind="k1", kl_control=KlControl(target=0.25, horizon=40)
    )
    maker = Advantages(recipe_of(algorithm))
    given = {
        name: by_position(shards, lambda *_, at=at: at) for name, at in (("old_logprobs", -1), ("ref_logprobs", -2))
    }
    maker.of_step(samples, shards, given, NO_GREEDY)
    # The KL is far over its target: the error is cut at 0.2, and 4 of 40 samples have passed.
    assert maker.state() == {"kl_coef": pytest.approx(0.5 * (1 + 0.2 * 4 / 40))}
    other = Advantages(recipe_of(algorithm))
    other.load_state(maker.state())
    assert other.state() == maker.state()
    fixed = Advantages(recipe_of(Algorithm(kl_coef=0.1, kl_in="reward")))
    fixed.load_state(maker.state())
    assert fixed.state() == {"kl_coef": 0.1}  # a weight that stays is the recipe's


@pytest.mark.parametrize(("level", "expected"), [("sequence", 2.0), ("token", 3.0)])
def test_a_reward_models_score_joins_the_graders(level: Any, expected: float) -> None:
    # It says 1 at each token and 2 at the last of sample 0, 0 elsewhere; it counts half.
    def score(sample: int, at: int) -> float:
        return 0.0 if sample else (2.0 if at == 4 else 1.0)

    algorithm = Algorithm(advantage="rloo")
    found, learnable = learn(
        algorithm, columns={"scores": score}, reward_model=RewardModel(path=Path("r"), weight=0.5, level=level)
    )
    # sequence: 1 + 0.5 x 2 against 0. token: the score after each of its 3 tokens, 1 + 0.5 (1 + 1 + 2) against 0.
    assert found["advantages"][0] == [expected] * 3
    assert learnable.metrics["reward/model_score"] == 0.5


def test_tokens_of_a_reward_model_are_rewarded_where_they_stand() -> None:
    found, _ = learn(
        Algorithm(advantage="gae", whiten=False, lam=1.0),
        columns={"scores": lambda sample, at: float(at), "values": lambda *_: 0.0},
        critic=Critic(),
        reward_model=RewardModel(path=Path("r"), level="token"),
    )
    # Sample 3 has tokens 2 and 3, scored 2 and 3, and a reward of 0.5 at its end.
    assert found["returns"][3] == [5.5, 3.5]


def test_importance_weights_multiply_the_advantages() -> None:
    rollout = -1.0  # of every token
    correction = Correction(kind="truncate", high=1.5)
    plain, _ = learn(Algorithm(advantage="rloo"))
    found, learnable = learn(
        Algorithm(advantage="rloo", correction=correction),
        columns={"old_logprobs": lambda sample, at: rollout + (1.0 if sample == 0 else 0.0)},
    )
    assert found["advantages"][0] == [1.5 * value for value in plain["advantages"][0]]
    assert found["advantages"][2] == plain["advantages"][2]
    assert learnable.metrics["rollout/correction_touched"] == pytest.approx(3 / 8)
    assert 0 < learnable.metrics["rollout/correction_ess"] < 1


def test_a_rejected_sequence_is_not_learned_from() -> None:
    rollout = -1.0  # of every token
    found, _ = learn(
        Algorithm(advantage="rloo", correction=Correction(kind="reject", level="token")),
        columns={"old_logprobs": lambda sample, at: rollout + (5.0 if (sample, at) == (0, 2) else 0.0)},
    )
    assert found["advantages"][0] == [0.0] * 3 and found["advantages"][1] == [-1.0]


def test_the_rollouts_own_log_probs_stand_in() -> None:
    samples, shards = step_of()
    recipe = recipe_of(Algorithm(advantage="rloo", old_logprobs="rollout"))
    made = Advantages(recipe).of_step(samples, shards, {}, NO_GREEDY).columns
    assert tuple(made) == column_names(recipe) == ("advantages", "old_logprobs")
    assert trained(shards, made["old_logprobs"])[0] == samples[0].rollout_logprobs.tolist()


def test_remax_compares_with_the_greedy_answer() -> None:
    found, _ = learn(Algorithm(advantage="remax"), greedy=np.array([0.5, 1.0], np.float32))
    assert found["advantages"] == {0: [0.5] * 3, 1: [-0.5], 2: [-1.0] * 2, 3: [-0.5] * 2}
    assert Advantages(recipe_of(Algorithm(advantage="remax"))).needs_greedy
    assert not Advantages(recipe_of(Algorithm())).needs_greedy


def own_advantages(token_rewards: Any, mask: Any, cu_seqlens: Any, group_index: Any, scale: float) -> Any:
    """A function as a user would write it: per token, with what is known of samples too, and a setting."""
    assert len(group_index) == len(RESPONSES)
    return scale * token_rewards


def own_returns(token_rewards: Any, values: Any, mask: Any, cu_seqlens: Any) -> AdvantagesAndReturns:
    """With returns, for a critic."""
    return gae(token_rewards, values, mask, cu_seqlens)


def test_a_users_function_is_given_what_its_parameters_name() -> None:
    algorithm = Algorithm(advantage=f"{__name__}:own_advantages", settings={"scale": 4.0})
    found, _ = learn(algorithm)
    assert found["advantages"] == {0: [0.0, 0.0, 4.0], 1: [0.0], 2: [0.0, 0.0], 3: [0.0, 2.0]}
    with pytest.raises(MegarlError, match=r"gave no returns, which the critic learns"):
        learn(algorithm, columns={"values": lambda *_: 0.0}, critic=Critic())
    made, _ = learn(Algorithm(advantage=f"{__name__}:own_returns"), columns={"values": lambda *_: 0.0}, critic=Critic())
    assert made["returns"][3] == [0.5, 0.5]


def test_an_empty_step_is_none_the_worse() -> None:
    shards = [Shard(())]
    step = Step(shards)
    assert step.columns(step.flat([[]])) == [[]]
    learnable = Advantages(recipe_of(Algorithm(advantage="rloo"))).of_step(
        [], shards, {"old_logprobs": [[]]}, NO_GREEDY
    )
    assert learnable.columns == {"advantages": [[]]}


def test_columns_come_back_as_they_were_laid_out() -> None:
    _, shards = step_of(2)
    values = [column_like(shard, np.arange(4)) for shard in shards]
    step = Step(shards)
    back = step.columns(step.flat(values))
    for mine, theirs in zip(back, values, strict=True):
        for one, other in zip(mine[0], theirs[0], strict=True):
            assert np.array_equal(one, other)
    assert whiten(step.flat(values), step.mask).shape == step.mask.shape
