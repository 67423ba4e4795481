"""The section that says what is learned from graded samples. Formulas and papers: docs/algorithms.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.recipe.section import Fraction, ImportPath, PositiveFloat, PositiveInt, Section

SampleAdvantage = Literal["grpo", "grpo_loo", "rloo", "reinforce_pp_baseline", "remax", "opo", "gpg", "egpo", "gdpo"]
TokenAdvantage = Literal["gae", "reinforce_pp", "distill", "grpo_turns"]
PolicyLoss = Literal["ppo", "gspo", "gmpo", "cispo", "gpg", "reinforce", "distill", "distill_top"]


class RejectBounds(Section):
    """Sequences whose ratio is outside of bounds are left out, whatever is done with the ratios of the others."""

    level: Literal["token", "sequence", "geometric"] = Field(
        "geometric", description="which ratio is looked at: of any token, of the whole sequence, or its geometric mean"
    )
    low: Annotated[float, Field(ge=0)] = Field(0.5, description="smallest ratio")
    high: PositiveFloat = Field(2.0, description="largest ratio")


class Correction(Section):
    """What is done about rollout and trainer giving a token other log-probs: importance weights, bounded."""

    kind: Literal["truncate", "mask", "reject"] = Field(
        "truncate",
        description="truncate: the ratio, at most high (TIS); mask: outside of [low, high] 0 (MIS); reject: whole sequences",
    )
    level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="ratio of each token, of the whole sequence, or its geometric mean"
    )
    low: Annotated[float, Field(ge=0)] = Field(0.5, description="smallest ratio; truncate has none")
    high: PositiveFloat = Field(2.0, description="largest ratio")
    reject: RejectBounds | None = Field(
        None,
        description="a second correction, whole sequences by a ratio of another level: verl's rollout_rs; default: none",
    )


class KlControl(Section):
    """The KL's weight is steered to a target (arXiv 1909.08593, section 2.2); needs kl_in: reward."""

    target: PositiveFloat = Field(description="wanted KL to the reference, nats a token")
    horizon: PositiveInt = Field(10_000, description="samples over which the weight adapts")


class KeepGroups(Section):
    """Which groups are trained on, where some are dropped: those whose scores differ, and are so good on average."""

    grader: str | None = Field(
        None,
        description="whose scores these are: a grader's name in reward.graders, or environment; default: the whole reward",
    )
    above: float | None = Field(None, description="the mean over the group has to be above it; default: however low")
    below: float | None = Field(None, description="the mean over the group has to be below it; default: however high")


class Algorithm(Section):
    """What is learned from the graded samples."""

    preset: str | None = Field(
        None, description="a published algorithm by name: its settings, under those that the recipe gives itself"
    )
    advantage: SampleAdvantage | TokenAdvantage | ImportPath = Field(
        "grpo", description="how good a sample or a token was; names: docs/algorithms.md; or pkg.module:function"
    )
    normalize_std: bool = Field(
        True, description="divide by the group's standard deviation; off: Dr.GRPO (arXiv 2503.20783)"
    )
    gamma: Fraction = Field(1.0, description="discount of a reward one token later; gae and reinforce_pp")
    lam: Fraction = Field(0.95, description="lambda of generalized advantage estimation; gae")
    whiten: bool | None = Field(
        None,
        description="advantages less their mean, over their deviation, both of all trained tokens of the step; default: gae's "
        "alone",
    )
    advantage_clip: PositiveFloat | None = Field(
        None, description="advantages are cut to so much on either side of 0, after whitening; default: however large"
    )
    overlong_buffer: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="share of max_response_tokens over which the reward falls by 1 (DAPO); default: no penalty"
    )
    truncated: Literal["learn", "mask"] = Field(
        "learn",
        description="samples that ended at a limit of length. mask: their tokens are out of the loss, the critic's too, and of "
        "its denominator (constant counts all samples); their rewards still count in their group",
    )
    policy_loss: PolicyLoss | ImportPath = Field(
        "ppo", description="what is minimised; names: docs/algorithms.md; or pkg.module:function"
    )
    clip_low: Fraction = Field(
        0.2, description="ratio is clipped below at 1 - clip_low; gmpo: its logarithm at -clip_low"
    )
    clip_high: PositiveFloat = Field(
        0.2, description="ratio is clipped above at 1 + clip_high; gmpo: its logarithm at clip_high"
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None, description="with ppo, a negative advantage costs at most so many times itself (arXiv 1912.09729)"
    )
    distill_top_k: PositiveInt = Field(
        64, description="how many of a teacher's likeliest tokens at each position it is compared at; distill_top"
    )
    distill_beta: Fraction = Field(
        1.0,
        description="divergence from the teacher: 1 is the reverse KL(policy || teacher), 0 the forward, between them the "
        "generalized Jensen-Shannon; distill_top",
    )
    distill_forward_weight: Fraction | None = Field(
        None,
        description="in the place of distill_beta: of a sum of both KLs the weight of the forward one, the reverse has the rest; "
        "distill_top",
    )
    settings: dict[str, float] = Field({}, description="further parameters of functions named by import path")
    kl_coef: Annotated[float, Field(ge=0)] = Field(
        0.0, description="weight of the KL to the reference; 0: no reference model"
    )
    kl_kind: Literal["k1", "k2", "k3", "abs"] = Field("k3", description="estimator of the KL")
    kl_in: Literal["loss", "reward"] = Field("loss", description="where the KL counts; reward: of each token")
    kl_control: KlControl | None = Field(None, description="steer kl_coef to a target; default: it stays")
    entropy_coef: Annotated[float, Field(ge=0)] = Field(0.0, description="weight of the entropy bonus")
    reduction: Literal["token-mean", "sequence-mean", "group-mean", "constant"] = Field(
        "token-mean",
        description="denominator of the loss; constant: tokens over samples x max_response_tokens (Dr.GRPO)",
    )
    drop_zero_variance_groups: bool = Field(
        False,
        description="leave out groups whose rewards are all equal, or those that keep_groups does not keep",
    )
    keep_groups: KeepGroups | None = Field(
        None, description="which groups are trained on where some are dropped; default: those whose rewards differ"
    )
    refill_rounds: Annotated[int, Field(ge=0)] = Field(
        0, description="times that further prompts are asked in the place of dropped groups (DAPO's dynamic sampling)"
    )
    old_logprobs: Literal["trainer", "rollout"] = Field(
        "trainer",
        description="of the policy that sampled: the rollout's own, or the trainer's; these from the update's own forward pass, "
        "where these are of a step's first mini-batch and nothing before it needs them",
    )
    max_logprob_diff: PositiveFloat | None = Field(
        None,
        description="a step whose rollout and trainer are further apart in the mean over trained tokens, |log-prob difference|, "
        "in nats (`rollout/logprob_diff_mean`), is not learned from; default: however far",
    )
    on_logprob_diff: Literal["stop", "skip", "rewind"] = Field(
        "stop",
        description="a step above max_logprob_diff. stop: ends the run; skip: leaves the step out (`rollout/drifted`); rewind: "
        "back to the last checkpoint, and on with other data",
    )
    correction: Correction | None = Field(
        None,
        description="importance weights between rollout and trainer; default: none, or truncated ones where "
        "rollout.max_staleness is above 0 (decoupled PPO); null: none at all",
    )
