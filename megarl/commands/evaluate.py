"""`megarl eval`: answers to held-out prompts, graded."""

from __future__ import annotations

from megarl.commands.options import Overrides, RecipePath


def evaluate(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Answer the held-out prompts with the server pool, grade the answers, and print accuracy and reward.

    All figures are in eval.json, in a new folder beside the run's: runs/NAME-eval, or NAME-eval-2 and so on.
    Takes the same recipe as `megarl train`; another model is named by model.path=FOLDER.

    Example: megarl eval recipes/quickstart.yaml model.path=runs/quickstart/hf
    """
    from megarl.run.evaluate import run_eval

    run_eval(recipe, overrides or [])
