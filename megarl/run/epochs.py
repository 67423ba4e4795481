"""How many steps a run of so many epochs is: the one place where `train.epochs` becomes `train.steps`.

Everything behind it, learning rates, the console, checkpoints and the recipe in the run's folder, knows steps alone.
"""

from __future__ import annotations

from decimal import Decimal

from megarl.core.errors import UserError
from megarl.data import supervised
from megarl.data.chat import load_tokenizer
from megarl.data.mix import rows_by_set
from megarl.data.prompts import load_prompts
from megarl.data.supervised import load_supervised
from megarl.models.config import ModelConfig
from megarl.models.recipe_vision import sight_of
from megarl.recipe.check import check_recipe
from megarl.recipe.load import Loaded
from megarl.recipe.schema import AnyRecipe, Recipe, RecipeT
from megarl.run.preflight import check_model_folder


def counts_rows(recipe: AnyRecipe) -> bool:
    """Whether the rows say how many steps the run is."""
    return recipe.train.epochs is not None


def with_steps(loaded: Loaded[RecipeT]) -> Loaded[RecipeT]:
    """The recipe with the steps of its epochs; as it is where it has none. loaded: with files in the place of names.

    Rows are counted as they are trained on, so that they are tokenised here as well as later: which are too long, nothing else
    tells. Raises UserError: rows that cannot be read, or fewer than one step takes.
    """
    recipe = loaded.recipe
    if recipe.train.epochs is None:
        return loaded
    model = check_model_folder(recipe.model.path)  # what is wrong with it is said as without epochs
    rows = _usable_rows(recipe, model)
    a_step = recipe.rollout.prompts_per_step if isinstance(recipe, Recipe) else recipe.train.batch_samples
    steps = steps_of(recipe.train.epochs, rows, a_step)
    if steps == 0:
        key = "rollout.prompts_per_step" if isinstance(recipe, Recipe) else "train.batch_samples"
        raise UserError(
            f"train.epochs {recipe.train.epochs:g} of the {rows} usable rows of {recipe.data.train} is less than one step of "
            f"{key} {a_step}. Raise train.epochs, lower {key}, or set train.steps in the place of train.epochs."
        )
    counted = in_steps(loaded, steps)
    # Data sets are files by now; the keys that name them were checked when the recipe was read.
    sources = {key: at for key, at in loaded.sources.items() if not key.startswith("data.")}
    if problems := check_recipe(counted.recipe, sources, recorded=loaded.recorded):
        raise UserError("\n".join(problems))
    return counted


def in_steps(loaded: Loaded[RecipeT], steps: int) -> Loaded[RecipeT]:
    """The recipe with so many steps in the place of its epochs, which were counted before."""
    train = loaded.recipe.train.model_copy(update={"steps": steps, "epochs": None})
    return loaded.with_recipe(loaded.recipe.model_copy(update={"train": train}))


def steps_of(epochs: float, rows: int, a_step: int) -> int:
    """Whole steps in so many times through the rows: a step may begin in one epoch and end in the next. a_step: rows of one.

    As the epochs are written: a float's 0.29 of 100 rows would be 28.
    """
    return int(Decimal(str(epochs)) * rows // a_step)


def _usable_rows(recipe: AnyRecipe, model: ModelConfig) -> int:
    """Rows of an epoch: within the length limit, and, where the recipe mixes sets, of a set with a share."""
    if not isinstance(recipe, Recipe):
        rows = load_supervised(recipe.data.train, recipe.model.path, recipe.data, sight_of(model, recipe.data))
        return sum(map(len, supervised.rows_by_set(rows, recipe.data).values())) or len(rows)
    tokenizer = load_tokenizer(recipe.model.path, recipe.data.chat_template_kwargs)
    sight = sight_of(model, recipe.data)
    prompts = load_prompts(recipe.data.train, tokenizer, recipe.data, answered=recipe.agent is None, sight=sight)
    return sum(map(len, rows_by_set(prompts.prompts, recipe.data).values())) or len(prompts)
