"""Whether the models that a recipe names beside the policy can do what their roles ask. Without torch."""

from __future__ import annotations

from pathlib import Path

from megarl.core.errors import UserError
from megarl.models.config import ModelConfig
from megarl.models.context import SAMPLE_PARTS, check_context
from megarl.models.hf_config import load_model_config
from megarl.models.hf_files import check_weights
from megarl.models.layout_check import check_layout
from megarl.models.rules import expected_tensors
from megarl.models.tower_files import with_tower
from megarl.recipe.layouts import role_layouts, tower_roles
from megarl.recipe.rollout_rules import longest_sample
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.recipe.scoring import asked_of_teacher

TOKENIZER = "tokenizer.json"


def check_roles(recipe: AnyRecipe, policy: ModelConfig) -> None:
    """Every role's model, tokens and layout. Raises UserError. policy: the model of model.path, checked already."""
    named = _named_models(recipe) if isinstance(recipe, Recipe) else {}
    models = {role: _model_of(role, path, recipe, policy) for role, path in named.items()}
    towers = tower_roles(recipe)
    for role, layout in role_layouts(recipe).items():
        model = models.get(role, policy)
        if role in towers:
            model = _with_tower(model, named.get(role, recipe.model.path), role, recipe)
        check_layout(model, layout, f"{role}.parallel")


def _with_tower(model: ModelConfig, folder: Path, role: str, recipe: AnyRecipe) -> ModelConfig:
    """The model with the vision tower that learns with it. Raises UserError where it has none, or is shown no image."""
    key = f"{role}.optimizer.freeze_vision_tower: false lets a vision tower learn, and"
    if model.vision is None:
        raise UserError(f"{key} {folder} is a model that sees no images. Remove the key, or name a model that does.")
    if recipe.data.images_key is None and not (isinstance(recipe, Recipe) and recipe.agent is not None):
        raise UserError(
            f"{key} with data.images_key null no row has an image. Name the field of images there, or remove the key."
        )
    return with_tower(model, folder)


def _named_models(recipe: Recipe) -> dict[str, Path]:
    """The folder of each role that has one of its own."""
    sections = {"critic": recipe.critic, "reward_model": recipe.reward_model, "teacher": recipe.teacher}
    return {
        role: section.path for role, section in sections.items() if section is not None and section.path is not None
    }


def _model_of(role: str, folder: Path, recipe: AnyRecipe, policy: ModelConfig) -> ModelConfig:
    model, key = load_model_config(folder), f"{role}.path {folder}"
    check_weights(expected_tensors(model), folder, model)
    if role == "reward_model" and model.head != "score":
        raise UserError(
            f"{key} is a language model, and a reward model has a head of one score (its architecture ends on "
            "ForSequenceClassification, num_labels 1). Train one by `megarl rm`, or name a folder that has it."
        )
    if not _sees_alike(model, policy):
        raise UserError(
            f"{key} has another token for a square of an image than model.path has, or squares of another size, and it is given "
            "the policy's images. Name a model of the policy's family, or one of text."
        )
    if role == "teacher" and model.head == "score":
        raise UserError(f"{key} has a score head and no vocabulary: it gives no log-probs. Name a language model.")
    if role == "teacher" and model.vocab_size != policy.vocab_size:
        raise UserError(
            f"{key} has a vocabulary of {model.vocab_size}, the policy of {policy.vocab_size}: their log-probs are not of "
            "the same tokens. Name a teacher of the policy's family."
        )
    if role == "teacher" and isinstance(recipe, Recipe):
        _check_top(recipe, model, key)
    _check_tokens(key, folder, recipe.model.path)
    if isinstance(recipe, Recipe):
        check_context(model, longest_sample(recipe), SAMPLE_PARTS, key)
    return model


def _sees_alike(model: ModelConfig, policy: ModelConfig) -> bool:
    ours, theirs = policy.vision, model.vision
    return ours is None or theirs is None or (ours.image_token, ours.square) == (theirs.image_token, theirs.square)


def _check_top(recipe: Recipe, teacher: ModelConfig, key: str) -> None:
    """There are as many likeliest tokens as are asked for."""
    k = recipe.algorithm.distill_top_k
    if asked_of_teacher(recipe)[1] and k > teacher.vocab_size:
        raise UserError(
            f"algorithm.distill_top_k: {k} is more than the vocabulary of {key}, which has {teacher.vocab_size} tokens. "
            "Set it to at most that; 64 is common."
        )


def _check_tokens(key: str, folder: Path, policy: Path) -> None:
    """The model is given the policy's tokens: the two tokenizers have to be the same."""
    ours, theirs = policy / TOKENIZER, folder / TOKENIZER
    if ours.exists() and theirs.exists() and ours.read_bytes() != theirs.read_bytes():
        raise UserError(
            f"{key} has another tokenizer than model.path {policy} ({TOKENIZER} differs), and it is given the policy's "
            "tokens. Name a model with the same tokenizer."
        )
