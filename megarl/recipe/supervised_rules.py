"""The rules about supervised runs, as data: keys that nothing reads in them."""

from __future__ import annotations

from megarl.recipe.rule import Contradiction, Unread
from megarl.recipe.supervised import DpoRecipe, KtoRecipe, SupervisedRecipe, with_reference

SUPERVISED = (SupervisedRecipe,)
DPO = (DpoRecipe,)
KTO = (KtoRecipe,)
SMOOTHED = ("sigmoid", "robust", "simpo", "orpo")  # losses that heed dpo.label_smoothing

SUPERVISED_UNREAD: tuple[Unread, ...] = (
    Unread(
        ("deadlines.rollout_s", "deadlines.sync_s", "deadlines.answer_s", "report.samples"),
        lambda r, _: False,
        "a supervised run has no rollout: it belongs to recipes of `megarl train`",
        SUPERVISED,
    ),
    Unread(
        ("cluster.file",),
        lambda r, _: False,
        "a supervised run has one role, and nothing to place: it belongs to recipes of `megarl train`",
        SUPERVISED,
    ),
    Unread(
        ("eval.before", "eval.every"),
        lambda r, _: r.data.eval is not None,
        "there are no held-out rows to evaluate on: set data.eval to a file",
        SUPERVISED,
    ),
    Unread(
        ("dpo.label_smoothing",),
        lambda r, _: r.dpo.loss in SMOOTHED,
        f"this loss has no labels that are wrong by chance: set dpo.loss to {', '.join(SMOOTHED[:-1])} or {SMOOTHED[-1]}",
        DPO,
    ),
    Unread(
        ("dpo.margin",),
        lambda r, _: r.dpo.loss != "apo_zero",
        "apo_zero looks at each answer by itself, and at no lead: set another dpo.loss",
        DPO,
    ),
    Unread(
        ("dpo.length_normalized",),
        lambda r, _: r.dpo.with_reference,
        "simpo and orpo go by means over tokens already: set dpo.loss to one with a reference, such as sigmoid",
        DPO,
    ),
    Unread(
        ("dpo.sft_coef",),
        lambda r, _: r.dpo.loss != "orpo",
        "orpo has this term already, of weight 1, and dpo.beta is the weight of the other: set another dpo.loss",
        DPO,
    ),
    Unread(
        ("reference.parallel",),
        lambda r, _: r.dpo.with_reference,
        "simpo and orpo have no reference: set dpo.loss to one with a reference, such as sigmoid",
        DPO,
    ),
    Unread(
        ("reference.offload",),
        lambda r, _: with_reference(r) and r.actor.lora is None,
        "there is no reference model of its own: set no actor.lora, and in dpo.loss one with a reference, such as sigmoid",
        DPO,
    ),
    Unread(
        ("reference.offload",),
        lambda r, _: r.actor.lora is None,
        "there is no reference model of its own: set no actor.lora",
        KTO,
    ),
    Unread(
        ("reference.refresh_every",),
        lambda r, _: False,
        "the reference of DPO and KTO stays what it was: it belongs to recipes of `megarl train`",
        DPO + KTO,
    ),
)

SUPERVISED_CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction(
        "dpo.loss",
        lambda r, _: r.dpo.loss == "robust" and r.dpo.label_smoothing == 0,
        lambda _: (
            "robust without dpo.label_smoothing is the loss of sigmoid. Set dpo.label_smoothing to the share of pairs that are "
            "the wrong way round"
        ),
        DPO,
    ),
    Contradiction(
        "train.batch_samples",
        lambda r, _: r.train.batch_samples < 2 and r.kto.loss == "kto",
        lambda _: (
            "the KL of KTO is estimated from prompts before the answers of other rows of a step. Set it to at least 2"
        ),
        KTO,
    ),
)
