"""The rules about supervised runs, as data: keys that nothing reads in them."""

from __future__ import annotations

from megarl.recipe.rule import Contradiction, Unread
from megarl.recipe.supervised import DpoRecipe, KtoRecipe, SupervisedRecipe, with_reference

SUPERVISED = (SupervisedRecipe,)
DPO = (DpoRecipe,)
KTO = (KtoRecipe,)

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
        lambda r, _: r.dpo.loss != "ipo",
        "the square of ipo is not smoothed: set dpo.loss to sigmoid, simpo or orpo",
        DPO,
    ),
    Unread(
        ("dpo.length_normalized",),
        lambda r, _: r.dpo.with_reference,
        "simpo and orpo go by means over tokens already: set dpo.loss to sigmoid or ipo",
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
        "simpo and orpo have no reference: set dpo.loss to sigmoid or ipo",
        DPO,
    ),
    Unread(
        ("reference.offload",),
        lambda r, _: with_reference(r) and r.actor.lora is None,
        "there is no reference model of its own: set no actor.lora, and in dpo.loss sigmoid or ipo",
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
        "train.batch_samples",
        lambda r, _: r.train.batch_samples < 2,
        lambda _: (
            "the KL of KTO is estimated from prompts before the answers of other rows of a step. Set it to at least 2"
        ),
        KTO,
    ),
)
