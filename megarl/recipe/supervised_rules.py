"""The rules about supervised runs, as data: keys that nothing reads in them."""

from __future__ import annotations

from megarl.recipe.rule import Unread
from megarl.recipe.supervised import DpoRecipe, SupervisedRecipe

SUPERVISED = (SupervisedRecipe,)
DPO = (DpoRecipe,)

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
        lambda r, _: r.dpo.with_reference and r.actor.lora is None,
        "there is no reference model of its own: set dpo.loss to sigmoid or ipo, and no actor.lora",
        DPO,
    ),
    Unread(
        ("reference.refresh_every",),
        lambda r, _: False,
        "the reference of DPO stays what it was: it belongs to recipes of `megarl train`",
        DPO,
    ),
)
