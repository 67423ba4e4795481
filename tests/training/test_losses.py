import math

import numpy as np
import pytest
import torch

from megarl.algorithms.policy_loss import (
    POLICY_LOSSES,
    PolicyLoss,
    cispo_loss,
    clipped_policy_loss,
    gmpo_loss,
    gspo_loss,
    reinforce_loss,
)
from megarl.core.errors import MegarlError
from megarl.core.layout import Layout
from megarl.core.types import MicroBatch
from megarl.recipe.algorithm import Algorithm
from megarl.training.batch import to_device
from megarl.training.logprob import TokenScores
from megarl.training.losses import policy_loss, sft_loss

pytestmark = pytest.mark.usefixtures("on_device")
OLD = [-1.0, -2.0, -0.5, 0.0]
MASK = [1.0, 1.0, 1.0, 0.0]


def batch(**columns):
    micro = MicroBatch(
        tokens=np.array([5, 6, 7, 8]),
        labels=np.array([6, 7, 8, 0]),
        cu_seqlens=np.array([0, 4], np.int32),
        loss_mask=np.array(MASK, np.float32),
        weights=np.array([0.5, 0.25, 0.25, 0.0], np.float32),
        rollout_logprobs=np.array([-1.1, -2.0, -0.5, 0.0], np.float32),
        sample_index=np.array([0]),
    )
    return to_device(
        micro,
        {name: np.array(column, np.float32) for name, column in columns.items()},
        str(torch.get_default_device()),
        Layout(),
        0,
    )


def scores(logprobs, entropy=(0.3, 0.6, 0.9, 7.0)):
    top = torch.tensor([[math.log(0.5), math.log(0.5)]] * len(logprobs), requires_grad=True)
    return TokenScores(torch.tensor(logprobs, requires_grad=True), torch.tensor(entropy, requires_grad=True), top)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_without_old_log_probs_a_loss_is_that_of_its_own(name):
    own, given = (
        [-1.0, -2.0, -0.5, 0.0],
        {"advantages": [1.0, -1.0, 2.0, 0.0], "teacher_logprobs": [-1.5, -1.0, -0.7, 0.0]},
    )
    if name == "distill_top":  # two classes: the likeliest token, and all others
        given["teacher_top"] = [[6.0, math.log(0.8), math.log(0.2)]] * 4
    algorithm = Algorithm(policy_loss=name)
    scored, alone = policy_loss(algorithm), policy_loss(algorithm, old_given=False)
    assert (scored.columns - alone.columns, alone.later, scored.later) == ({"old_logprobs"}, {"old_logprobs"}, set())
    assert (alone.read(0), alone.read(1)) == (alone.columns, scored.columns)
    one, other = scores(own), scores(own)
    with_old = scored.fn(one, batch(old_logprobs=own, **given))
    without = alone.fn(other, batch(**given))
    with_old.loss.backward()
    without.loss.backward()
    received = [each.top if name == "distill_top" else each.logprobs for each in (one, other)]
    assert without.loss == with_old.loss and torch.equal(received[0].grad, received[1].grad)
    assert received[0].grad.any()
    assert without.sums == with_old.sums and without.maxima == with_old.maxima
    assert without.sums["rollout/logprob_diff_mean"] > 0


def test_clipped_policy_loss_by_hand():
    # Ratios 1.5 (clipped to 1.2 by A > 0), 0.5 (clipped to 0.8 by A < 0), 1.1 (inside).
    logprobs = [old + math.log(ratio) for old, ratio in zip(OLD, [1.5, 0.5, 1.1, 1.0], strict=True)]
    loss = policy_loss(Algorithm())
    given = scores(logprobs)
    output = loss.fn(given, batch(old_logprobs=OLD, advantages=[1.0, -1.0, 2.0, 0.0]))
    expected = 0.5 * -1.2 + 0.25 * 0.8 + 0.25 * -2.2
    assert output.loss.item() == pytest.approx(expected, abs=1e-6)
    output.loss.backward()
    # d(-w A ratio)/d logprob = -w A ratio where it is not clipped.
    assert given.logprobs.grad.tolist() == pytest.approx([0.0, 0.0, -0.25 * 2.0 * 1.1, 0.0], abs=1e-6)
    assert given.entropy.grad is None
    assert output.num_tokens == 3
    assert output.sums["actor/pg_clipfrac"] == 2
    assert output.sums["actor/entropy"].item() == pytest.approx(1.8)
    approx_kl = sum(ratio - 1 - math.log(ratio) for ratio in (1.5, 0.5, 1.1))
    assert output.sums["actor/approx_kl"].item() == pytest.approx(approx_kl, abs=1e-6)
    assert output.sums["rollout/logprob_diff_mean"].item() == pytest.approx(0.1, abs=1e-6)
    assert output.maxima["rollout/logprob_diff_max"].item() == pytest.approx(0.1, abs=1e-6)


def test_the_rollout_is_compared_with_the_trainer_where_its_own_log_probs_are_the_old_ones():
    loss = policy_loss(Algorithm(old_logprobs="rollout"))
    rollout = [-1.1, -2.0, -0.5, 0.0]
    output = loss.fn(scores(OLD), batch(old_logprobs=rollout, advantages=[1.0, -1.0, 2.0, 0.0]))
    assert output.sums["rollout/logprob_diff_mean"].item() == pytest.approx(0.1, abs=1e-6)
    assert output.maxima["rollout/logprob_diff_max"].item() == pytest.approx(0.1, abs=1e-6)


def per_token(name, logprobs, advantages):
    """The functions themselves, on the three trained tokens of the one sequence."""
    new, old, given = (torch.tensor(values[:3]) for values in (logprobs, OLD, advantages))
    if name == "gspo":
        return gspo_loss(new, given, (new - old).mean().expand(3), 0.1, 0.2).loss
    if name == "gmpo":
        return gmpo_loss(new, old, given, lambda values: values.mean().expand(3), 0.1, 0.2).loss
    if name == "cispo":
        return cispo_loss(new, old, given, 0.1, 0.2).loss
    if name == "reinforce":
        return reinforce_loss(new, old, given).loss
    return clipped_policy_loss(new, old, given, 0.1, 0.2, dual_clip=3.0).loss


@pytest.mark.parametrize("name", ["ppo", "gspo", "gmpo", "cispo", "reinforce"])
def test_the_recipe_chooses_the_policy_loss(name):
    settings = {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": 3.0 if name == "ppo" else None}
    logprobs, advantages = [-0.6, -0.5, -0.7, 0.0], [1.0, -1.0, 2.0, 0.0]
    output = policy_loss(Algorithm(policy_loss=name, **settings)).fn(
        scores(logprobs), batch(old_logprobs=OLD, advantages=advantages)
    )
    expected = (per_token(name, logprobs, advantages) * torch.tensor([0.5, 0.25, 0.25])).sum()
    assert output.loss.item() == pytest.approx(expected.item(), abs=1e-6)


def sign_loss(logprobs, advantages):
    """Divides by 0 where an advantage is."""
    return PolicyLoss(-advantages / advantages.abs() * logprobs, advantages < 0, logprobs.detach().exp())


def mean_loss(logprobs, advantages):
    return PolicyLoss((-advantages * logprobs).mean(), advantages < 0, logprobs.detach().exp())


def centred_loss(logprobs, advantages, sequence_mean):
    """A user's: against the mean of its sequence; what lies outside of the mask is in no mean."""
    centred = advantages - sequence_mean(logprobs + 100 * (logprobs == 0))
    return PolicyLoss(-centred * logprobs, advantages < 0, logprobs.detach().exp())


def bare_loss(logprobs, advantages):
    return -advantages * logprobs


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sign_loss", "losses that are not finite, of 1 trained tokens and 1 others. Where a token is not trained on"),
        ("mean_loss", r"a loss of shape \(\); \(4,\) is needed"),
        ("bare_loss", "a Tensor; a megarl.algorithms.policy_loss.PolicyLoss is needed"),
    ],
)
def test_what_a_users_loss_gives_is_looked_at(name, said):
    loss = policy_loss(Algorithm(policy_loss=f"{__name__}:{name}"))
    with pytest.raises(MegarlError, match=f"algorithm.policy_loss: {__name__}:{name} gave {said}"):
        loss.fn(scores(OLD), batch(old_logprobs=OLD, advantages=[1.0, 0.0, -1.0, 0.0]))


@pytest.mark.parametrize("name", ["gspo", "gmpo", f"{__name__}:centred_loss"])
def test_a_sequence_cut_over_ranks_has_one_ratio(name):
    """Two context-parallel ranks, one after the other: each adds what the other holds."""
    old, new = np.log(np.array([0.5, 0.4, 0.3, 0.2, 0.1, 0.2, 0.3, 0.0001])), np.log(np.full(8, 0.25))
    micro = MicroBatch(
        tokens=np.arange(8),
        labels=np.arange(8),
        cu_seqlens=np.array([0, 8], np.int32),
        loss_mask=np.array([0, 1, 1, 1, 1, 1, 1, 0], np.float32),
        weights=np.full(8, 1 / 6, np.float32),
        rollout_logprobs=np.zeros(8, np.float32),
        sample_index=np.array([0]),
    )
    columns = {"old_logprobs": old.astype(np.float32), "advantages": np.ones(8, np.float32)}
    algorithm = Algorithm(policy_loss=name, clip_low=0.9, clip_high=9.0)
    whole = to_device(micro, columns, str(torch.get_default_device()), Layout(), 0)
    expected = policy_loss(algorithm).fn(scores(new.tolist(), [0.0] * 8), whole).loss
    layout = Layout(cp=2, world_size=2)
    parts = [to_device(micro, columns, str(torch.get_default_device()), layout, rank) for rank in range(2)]
    held = [[0, 1, 6, 7], [2, 3, 4, 5]]
    sums = []
    for part, positions in zip(parts, held, strict=True):
        keep = lambda local: sums.append(local.clone()) or local  # noqa: E731
        policy_loss(algorithm, keep).fn(scores(new[positions].tolist(), [0.0] * 4), part)
    found = [
        policy_loss(algorithm, lambda _: sums[0] + sums[1]).fn(scores(new[positions].tolist(), [0.0] * 4), part).loss
        for part, positions in zip(parts, held, strict=True)
    ]
    assert sum(found).item() == pytest.approx(expected.item(), rel=1e-6)


def test_kl_and_entropy_enter_the_loss_with_their_coefficients():
    loss = policy_loss(Algorithm(kl_coef=0.1, kl_kind="k2", entropy_coef=0.01))
    assert loss.columns == {"old_logprobs", "advantages", "ref_logprobs"}
    assert loss.entropy_grad
    given = scores(OLD)
    output = loss.fn(given, batch(old_logprobs=OLD, advantages=[0.0] * 4, ref_logprobs=[-1.0, -2.4, -0.5, 9.0]))
    kl = 0.25 * 0.4**2 / 2
    entropy = 0.5 * 0.3 + 0.25 * 0.6 + 0.25 * 0.9
    assert output.weighted["actor/kl_loss"].item() == pytest.approx(kl, abs=1e-6)
    assert output.loss.item() == pytest.approx(0.1 * kl - 0.01 * entropy, abs=1e-6)
    output.loss.backward()
    assert given.entropy.grad.tolist() == pytest.approx([-0.005, -0.0025, -0.0025, 0.0])


def test_without_kl_no_reference_is_read():
    assert policy_loss(Algorithm()).columns == {"old_logprobs", "advantages"}


def test_sft_loss_is_the_weighted_cross_entropy():
    loss = sft_loss()
    assert not loss.with_entropy
    given = TokenScores(torch.tensor([-1.0, -2.0, -4.0, -99.0], requires_grad=True), None)
    output = loss.fn(given, batch())
    assert output.loss.item() == pytest.approx(0.5 * 1 + 0.25 * 2 + 0.25 * 4)
    output.loss.backward()
    assert given.logprobs.grad.tolist() == [-0.5, -0.25, -0.25, 0.0]


def test_dft_counts_each_label_by_its_probability():
    given = TokenScores(torch.tensor([-1.0, -2.0, -4.0, -99.0], requires_grad=True), None)
    output = sft_loss(dft=True).fn(given, batch())
    counts = [0.5 * math.exp(-1), 0.25 * math.exp(-2), 0.25 * math.exp(-4), 0.0]
    assert output.loss.item() == pytest.approx(counts[0] * 1 + counts[1] * 2 + counts[2] * 4)
    output.loss.backward()
    assert given.logprobs.grad.tolist() == pytest.approx([-count for count in counts])


def test_what_lies_outside_the_mask_reaches_neither_gradient_nor_metrics():
    infinite = [*OLD[:3], float("-inf")]
    given = scores(OLD, entropy=[0.3, 0.6, 0.9, float("nan")])
    loss = policy_loss(Algorithm(kl_coef=0.1, entropy_coef=0.1))
    output = loss.fn(given, batch(old_logprobs=infinite, advantages=[1.0] * 4, ref_logprobs=infinite))
    output.loss.backward()
    for values in (given.logprobs.grad, given.entropy.grad):
        assert torch.isfinite(values).all()
        assert values[3] == 0
    reported = [*output.weighted.values(), *output.sums.values(), *output.maxima.values()]
    assert all(torch.isfinite(value) for value in reported)


def test_distillation_at_the_likeliest_tokens_by_hand_and_nothing_from_outside_the_mask():
    """Two classes: the teacher's token and all others. The policy has 1/2 of both; untrained positions hold no numbers."""
    taught = [[6.0, math.log(share), math.log(1 - share)] for share in (0.8, 0.5, 0.9)] + [[6.0, math.nan, -math.inf]]
    half = [math.log(0.5)] * 2
    top = torch.tensor([half, half, half, [-math.inf, math.nan]], requires_grad=True)
    given = scores(OLD)._replace(top=top)
    loss = policy_loss(Algorithm(policy_loss="distill_top", distill_beta=0.0))
    assert loss.columns == {"old_logprobs", "teacher_top"}
    output = loss.fn(given, batch(old_logprobs=OLD, teacher_top=taught))
    output.loss.backward()

    def apart(share):  # KL(teacher || policy)
        return share * math.log(share / 0.5) + (1 - share) * math.log((1 - share) / 0.5)

    expected = 0.5 * apart(0.8) + 0.25 * apart(0.9)
    assert output.loss.item() == output.weighted["actor/pg_loss"].item() == pytest.approx(expected, rel=1e-5)
    assert output.sums["actor/teacher_rest"].item() == pytest.approx(0.2 + 0.5 + 0.1, rel=1e-5)
    # -P times the weight, at each class.
    assert top.grad.flatten().tolist() == pytest.approx([-0.4, -0.1, -0.125, -0.125, -0.225, -0.025, 0, 0], rel=1e-5)
    reported = [*output.weighted.values(), *output.sums.values(), *output.maxima.values()]
    assert all(torch.isfinite(value) for value in reported)


def test_positions_restart_at_every_sequence():
    micro = MicroBatch(
        tokens=np.arange(5),
        labels=np.arange(5),
        cu_seqlens=np.array([0, 2, 5], np.int32),
        loss_mask=np.ones(5, np.float32),
        weights=np.ones(5, np.float32),
        rollout_logprobs=np.zeros(5, np.float32),
        sample_index=np.array([0, 1]),
    )
    assert to_device(micro, {}, str(torch.get_default_device()), Layout(), 0).positions.tolist() == [0, 1, 0, 1, 2]
