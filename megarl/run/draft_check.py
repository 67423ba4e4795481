"""Whether servers that are to guess tokens ahead have what they guess by: the model's own layers, or a draft."""

from __future__ import annotations

from megarl.core.errors import UserError
from megarl.models.config import ModelConfig
from megarl.models.hf_files import read_index
from megarl.models.predicting import predicting
from megarl.recipe.schema import Recipe
from megarl.recipe.speculation_rules import ALGORITHM, OF_A_FOLDER, OF_OWN_LAYERS, guesses

DRAFT_FLAGS = ("--speculative-draft-model-path", "--speculative-draft-model")


def check_draft(recipe: Recipe, model: ModelConfig) -> None:
    """Raises UserError where they have not: SGLang would make layers of what is in memory, and none of their guesses hold."""
    words, folder = recipe.rollout.server_args, recipe.model.path
    if any(word.partition("=")[0] in DRAFT_FLAGS for word in words):
        return
    if guesses(words) in OF_A_FOLDER:
        raise UserError(
            f"`rollout.server_args`: {ALGORITHM} {guesses(words)} guesses by a draft, and none is named. Add "
            f"{DRAFT_FLAGS[0]} and the folder of one that was made for this model."
        )
    if guesses(words) in OF_OWN_LAYERS and not predicting(read_index(folder), model):
        raise UserError(
            f"`rollout.server_args`: with {ALGORITHM} {guesses(words)} servers guess by the model's own layers, and {folder} "
            f"has none that predict further tokens. Name one that has them, a draft's ({DRAFT_FLAGS[0]}), or NGRAM, "
            "which guesses from the text so far."
        )
