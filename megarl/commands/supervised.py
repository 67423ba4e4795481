"""`megarl sft`, `rm`, `dpo` and `kto`: the supervised commands."""

from __future__ import annotations

from megarl.commands.options import GoOn, Overrides, RecipePath, Resume


def sft(recipe: RecipePath, overrides: Overrides = None, resume: Resume = False, go_on: GoOn = False) -> None:
    """Train a model on demonstrations, on the same Megatron engine.

    Rows hold chats (`messages`) or a prompt and a response; only the assistant's tokens are trained on.

    Example: megarl sft recipes/quickstart_sft.yaml
    """
    from megarl.recipe.supervised import SftRecipe
    from megarl.run.supervised import run_supervised

    run_supervised(SftRecipe, recipe, overrides or [], resume, go_on)


def rm(recipe: RecipePath, overrides: Overrides = None, resume: Resume = False, go_on: GoOn = False) -> None:
    """Train a reward model on pairs of a chosen and a rejected answer (Bradley-Terry).

    Rows hold `chosen` and `rejected`: texts beside a `prompt`, or whole chats; a `margin` is used where present. The model
    gets a head of one score at the last token. hf/ is a sequence classifier, which transformers loads (but of models
    that see images) and `megarl train` takes as reward_model.path.

    Example: megarl rm recipes/quickstart_rm.yaml
    """
    from megarl.recipe.supervised import RmRecipe
    from megarl.run.supervised import run_supervised

    run_supervised(RmRecipe, recipe, overrides or [], resume, go_on)


def dpo(recipe: RecipePath, overrides: Overrides = None, resume: Resume = False, go_on: GoOn = False) -> None:
    """Train a policy on pairs of a chosen and a rejected answer, without a reward model (DPO, IPO, SimPO, ORPO).

    Rows are those of `megarl rm`. The reference is the model as it was before the run; SimPO and ORPO (`dpo.loss`) have none.

    Example: megarl dpo recipes/quickstart_dpo.yaml
    """
    from megarl.recipe.supervised import DpoRecipe
    from megarl.run.supervised import run_supervised

    run_supervised(DpoRecipe, recipe, overrides or [], resume, go_on)


def kto(recipe: RecipePath, overrides: Overrides = None, resume: Resume = False, go_on: GoOn = False) -> None:
    """Train a policy on answers that are labelled one by one, without pairs and without a reward model (KTO).

    Rows hold a `completion` beside a `prompt`, or a whole chat, and a `label`: true where the answer is desirable. The reference
    is the model as it was before the run.

    Example: megarl kto recipes/quickstart_kto.yaml
    """
    from megarl.recipe.supervised import KtoRecipe
    from megarl.run.supervised import run_supervised

    run_supervised(KtoRecipe, recipe, overrides or [], resume, go_on)
