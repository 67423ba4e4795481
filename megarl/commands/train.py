"""`megarl train`: reinforcement learning."""

from __future__ import annotations

from megarl.commands.options import DiscardJournal, GoOn, Overrides, RecipePath, Resume
from megarl.core.errors import UserError


def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    resume: Resume = False,
    go_on: GoOn = False,
    discard_journal: DiscardJournal = False,
) -> None:
    """Train a policy by reinforcement learning.

    Checks the whole recipe first (keys, batch sizes, model folder, data rows, reward function) and refuses it with one
    paragraph and exit code 2. Then starts the servers and ranks, trains, and leaves in the run's folder: metrics.jsonl,
    curve.png, logs/, samples/, checkpoints/ and hf/, which transformers loads.

    Example: megarl train recipes/quickstart.yaml run.seed=2 train.steps=20
    """
    if discard_journal and not (resume or go_on):
        raise UserError(
            "--discard-journal forgets what an earlier start of the run recorded: give it with --resume or --continue."
        )
    from megarl.run.train import run_train

    run_train(recipe, overrides or [], resume, go_on, discard_journal)
