"""Whether a recipe's model is one for what the recipe does with it: its head, adapters, experts. Part of the preflight."""

from __future__ import annotations

from pathlib import Path

from megarl.core.errors import UserError
from megarl.core.json_file import read_object
from megarl.core.platform import Platform
from megarl.data.chat import QUESTION, Tokenizer, behind_turn, load_tokenizer, special_ids, turn_end
from megarl.models.config import ModelConfig
from megarl.models.hf_config import EOS, GENERATION, load_model_config
from megarl.models.lora_settings import LoraSettings, adaptable, all_linears
from megarl.recipe.load import Loaded
from megarl.recipe.roles import ALL_LINEARS
from megarl.recipe.schema import AnyRecipe, Recipe, RecipeT
from megarl.recipe.supervised import RmRecipe, SupervisedRecipe

CLOCK = "strftime_now("  # what a template asks for the date

END_OF_MESSAGE = "<|eom_id|>"  # of Llama 3: SGLang ends a response at it whatever the configs say


def check_head(recipe: SupervisedRecipe, model: ModelConfig) -> None:
    """A reward model learns by its score head, everything else by the vocabulary. Raises UserError."""
    scores = isinstance(recipe, RmRecipe)
    if model.head == "score" and not scores:
        raise UserError(
            f"model.path {recipe.model.path} is a reward model: it has one score a token in the place of a vocabulary. "
            "Name a language model, or train on pairs by `megarl rm`."
        )
    if scores and model.head != "score" and recipe.actor.lora is not None:
        raise UserError(
            f"model.path {recipe.model.path} is a language model, whose new score head begins at zero, and under actor.lora "
            "only adapters learn. Remove actor.lora, or begin with a reward model."
        )
    if scores and model.vision is not None and recipe.actor.lora is not None:
        raise UserError(
            f"model.path {recipe.model.path} is a reward model that sees images, of which transformers has none: nothing but "
            "megarl could load its adapters. Remove actor.lora."
        )


def with_linears(loaded: Loaded[RecipeT], model: ModelConfig | None = None) -> Loaded[RecipeT]:
    """The recipe with the names of its model's linears in the place of `actor.lora.targets: all`. model: where it is read."""
    recipe = loaded.recipe
    lora = recipe.actor.lora
    if lora is None or lora.targets != ALL_LINEARS:
        return loaded
    model = load_model_config(recipe.model.path) if model is None else model
    lora = lora.model_copy(update={"targets": tuple(all_linears(model))})
    actor = recipe.actor.model_copy(update={"lora": lora})
    return loaded.with_recipe(recipe.model_copy(update={"actor": actor}))


def check_lora(recipe: AnyRecipe, model: ModelConfig) -> None:
    """Adapters on linears that the model has. Raises UserError."""
    lora = recipe.actor.lora
    if lora is None:
        return
    LoraSettings(lora.rank, lora.alpha, lora.targets)
    possible = adaptable(model)
    if missing := [target for target in lora.targets if target not in possible]:
        raise UserError(
            f"actor.lora.targets names {', '.join(missing)}, and {recipe.model.path} has none. "
            f"Choose among {', '.join(possible)}."
        )


def check_experts(recipe: AnyRecipe, model: ModelConfig, platform: Platform) -> None:
    """Keys that speak of experts need a model that has some, and servers that say which they chose. Raises UserError."""
    replay = isinstance(recipe, Recipe) and recipe.actor.routing_replay
    asked = {
        "actor.aux_loss_coef": recipe.actor.aux_loss_coef > 0,
        "actor.routing_replay": replay,
        "actor.optimizer.freeze_router": recipe.actor.optimizer.freeze_router,
    }
    critic = recipe.critic if isinstance(recipe, Recipe) else None
    if critic is not None and critic.optimizer.freeze_router:
        folder = critic.path or recipe.model.path
        if load_model_config(folder).moe is None:
            raise UserError(
                f"critic.optimizer.freeze_router is for a mixture of experts, and {folder} has none. Remove the key."
            )
    if model.moe is None and any(asked.values()):
        names = " and ".join(name for name, given in asked.items() if given)
        raise UserError(f"{names} is for a mixture of experts, and {recipe.model.path} has none. Remove the key.")
    scaled = isinstance(recipe, Recipe) and model.moe is not None and model.moe.normed and platform.copies_router_scale
    if scaled and recipe.actor.lora is None and not recipe.actor.optimizer.freeze_router:
        raise UserError(
            f"`actor.optimizer.freeze_router` is false, and on {platform.name} SGLang 0.5.21 takes router.scale of "
            f"{model.architecture} once, from the folder: its servers would choose other experts than training from the first "
            "step on. Set it to true, or train adapters (actor.lora)."
        )
    if replay and not platform.returns_routing:
        raise UserError(
            f"actor.routing_replay needs servers that return their routing, and on {platform.name} SGLang does not. "
            "Set it to false, or run on cuda."
        )


def _writes_day(tokenizer: Tokenizer) -> bool:
    """Whether the chat template writes the day into a prompt, as gpt-oss' and Llama 3.2's do unless they are given one."""
    template = tokenizer.chat_template
    if not isinstance(template, str) or CLOCK not in template:
        return False

    def rendered(day: str) -> str:
        # In the place of the function a text, whose method of that name gives it back.
        dated = template.replace(CLOCK, f"'{day}'.format(")
        return str(tokenizer.apply_chat_template([QUESTION], tokenize=False, chat_template=dated))

    try:
        return rendered("one day") != rendered("another")
    except Exception:  # as of `apply_template`; told of with the rows
        return False


def template_notes(recipe: AnyRecipe, model: ModelConfig) -> tuple[str, ...]:
    """Lines for a chat template that ends turns by what ends no response, or that writes the day."""
    folder = recipe.model.path
    tokenizer = load_tokenizer(folder, recipe.data.chat_template_kwargs)
    day = (
        f"the chat template of {folder} writes the day into its texts, that of each start of the run: on another day a run that "
        "goes on has other tokens there. Where the template takes a date, data.chat_template_kwargs may give it one"
    )
    ends = (
        ()
        if isinstance(recipe, RmRecipe)
        else (*_end_notes(recipe, model, tokenizer), *_unsaid_ends(folder, model, tokenizer))
    )
    return (*ends, *([day] if _writes_day(tokenizer) else []))


def _unsaid_ends(folder: Path, model: ModelConfig, tokenizer: Tokenizer) -> tuple[str, ...]:
    """A line where no key says what ends a response, and what transformers and SGLang take in its place is a token of texts."""
    if EOS in read_object(folder / "config.json", "Export the model again."):
        return ()
    plain = [end for end in model.eos_token_ids if end < len(tokenizer) and end not in special_ids(tokenizer)]
    if not plain:
        return ()
    tokens = ", ".join(f"{end} ({tokenizer.convert_ids_to_tokens(end)!r})" for end in plain)
    return (
        f"config.json of {folder} has no {EOS}, and transformers and SGLang end responses at their own in its place: {tokens}, "
        f"which is no special token. Write {EOS} there: the token that ends a turn, or null for that of the tokenizer",
    )


def _end_notes(recipe: AnyRecipe, model: ModelConfig, tokenizer: Tokenizer) -> tuple[str, ...]:
    """A line for a chat template that ends the assistant's turn by a token that ends no response: each may run to its limit.

    Of supervised runs, because of the model that they leave.
    """
    folder = recipe.model.path
    stop, key = (recipe.rollout.stop, ", or to rollout.stop") if isinstance(recipe, Recipe) else ((), "")
    generation, more = folder / GENERATION, None
    if generation.is_file():
        more = read_object(generation, "Save it again.").get(EOS)
    ends = [*model.eos_token_ids, *(more if isinstance(more, list) else [more]), tokenizer.eos_token_id]
    end = turn_end(tokenizer)
    token = "" if end is None else str(tokenizer.convert_ids_to_tokens(end))
    if end is None and not isinstance(recipe, Recipe) and behind_turn(tokenizer) is not None:
        return (
            f"the chat template of {folder} puts no special token behind the assistant's last turn: rows teach the model no end "
            "of its turns",
        )
    if end is None or end in ends or token in (*stop, END_OF_MESSAGE):
        return ()
    return (
        f"the chat template of {folder} ends the assistant's turn with {token}, which ends no response: a policy that writes it "
        f"goes on to its limit. Add it to eos_token_id in generation_config.json, beside what is there{key}",
    )
