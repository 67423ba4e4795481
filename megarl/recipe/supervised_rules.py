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
        lambda r, _: r.dpo.loss == "sigmoid",
        "only the loss sigmoid is smoothed: set dpo.loss to sigmoid",
        DPO,
    ),
    Unread(
        ("reference.offload",),
        lambda r, _: r.actor.lora is None,
        "there is no reference model of its own: set no actor.lora",
        DPO,
    ),
    Unread(
        ("reference.refresh_every",),
        lambda r, _: False,
        "the reference of DPO stays what it was: it belongs to recipes of `megarl train`",
        DPO,
    ),
)
