"""What a run's rows are looked at for before it starts: tokens that the model lacks, rows that nothing can come of, sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megarl.agents.row_kinds import check_kinds
from megarl.core.errors import UserError
from megarl.core.types import Prompt, TokenArray
from megarl.core.words import some
from megarl.data.answers import accepted
from megarl.data.chat import load_tokenizer
from megarl.data.mix import RowsBySet
from megarl.data.pairs import Pair
from megarl.data.prompts import MESSAGES_KEY, PromptSet, load_prompts
from megarl.data.rows import place_of
from megarl.data.supervised import Rows
from megarl.data.unpaired import FEWEST_ROWS, Unpaired
from megarl.models.config import ModelConfig
from megarl.models.hf_config import load_model_config
from megarl.models.recipe_vision import sight_of
from megarl.recipe.agent import Agent
from megarl.recipe.keep_rules import set_of
from megarl.recipe.layouts import tower_roles
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.recipe.supervised import DpoRecipe, KtoRecipe, SupervisedRecipe
from megarl.rewards.check import check_rendered, compares_answers
from megarl.rewards.row_choice import check_choice, first_ungraded

BALANCED = (1.0, 4 / 3)  # what desirable answers may count, in parts of what the others do
OF_LABEL = {"kto/eval_desirable_reward": True, "kto/eval_undesirable_reward": False}
MOST_SETS = 64  # of held-out rows with figures of their own


def checked_prompts(recipe: Recipe, path: Path, model: ModelConfig) -> PromptSet:
    """The rows of a file as prompts whose tokens the model has. Raises UserError."""
    tokenizer = load_tokenizer(recipe.model.path, recipe.data.chat_template_kwargs)
    sight = sight_of(model, recipe.data)
    prompts = load_prompts(path, tokenizer, recipe.data, answered=recipe.agent is None, sight=sight)
    check_tokens(path, ((each.id, each.token_ids) for each in prompts.prompts), model, recipe.model.path)
    check_seen(recipe, path, prompts.prompts)
    return prompts


def check_seen(recipe: Recipe, path: Path, prompts: Sequence[Prompt]) -> None:
    """Raises UserError for a row with images where somebody beside the policy is given its tokens, and sees none."""
    showing = [prompt for prompt in prompts if prompt.images]
    check_tower_sees(recipe, path, some=bool(showing))
    if not showing:
        return
    row = f"{place_of(path, showing[0].id)}: the row has images"
    if recipe.agent is not None:
        _check_shown(recipe.agent, path, showing)
    if recipe.teacher is not None and recipe.teacher.servers is not None:
        raise UserError(
            f"{row}, and a teacher behind an address is asked about text alone. Leave such rows out, or name a teacher that sees "
            "images by teacher.path, in the place of teacher.servers."
        )
    sections = {"critic": recipe.critic, "reward_model": recipe.reward_model, "teacher": recipe.teacher}
    for role, section in sections.items():
        folder = section.path if section is not None else None
        if folder is not None and load_model_config(folder).vision is None:
            raise UserError(
                f"{row}, and {role}.path {folder} is a model that sees none. Name another, or leave such rows out."
            )


def check_tower_sees(recipe: AnyRecipe, path: Path, *, some: bool) -> None:
    """Raises UserError where a vision tower is to learn from rows that have no image. some: whether any of the file's has one."""
    towers = sorted(tower_roles(recipe))
    shows = some or (isinstance(recipe, Recipe) and recipe.agent is not None)  # episodes may show others
    if towers and not shows and path == recipe.data.train:
        raise UserError(
            f"{towers[0]}.optimizer.freeze_vision_tower: false lets a vision tower learn, and no row of {path} has an image in "
            f"its field {recipe.data.images_key!r} (data.images_key). Name the field of images there, or remove the key."
        )


def _check_shown(agent: Agent, path: Path, showing: Sequence[Prompt]) -> None:
    """Raises UserError for a row with images whose episodes show none: those that are split."""
    if agent.rewritten == "split":
        raise UserError(
            f"{place_of(path, showing[0].id)}: the row has images, and episodes with agent.rewritten: split show none. Set it to "
            "keep, or leave such rows out."
        )


def check_tokens(path: Path, rows: Iterable[tuple[str, TokenArray]], model: ModelConfig, folder: Path) -> None:
    """A tokenizer may have more tokens than the model; a row that has one of these is refused. Raises UserError."""
    for name, ids in rows:
        largest = int(ids.max(initial=0))
        if largest >= model.vocab_size:
            token = load_tokenizer(folder).convert_ids_to_tokens(largest)
            raise UserError(
                f"{place_of(path, name)}: the tokenizer makes token {largest} ({token!r}) of it, and the model's vocabulary "
                f"has {model.vocab_size} tokens (vocab_size in {folder / 'config.json'}). Take the tokenizer that the model "
                "came with, or leave the row out."
            )


def label_notes(recipe: SupervisedRecipe, rows: Rows, sets: RowsBySet) -> tuple[str, ...]:
    """A line where KTO's desirable and undesirable answers count too differently (arXiv 2402.01306, section 4.2).

    sets: as of `check_graded`. Raises UserError where too few are trained on for an estimate of the KL.
    """
    if not isinstance(recipe, KtoRecipe):
        return ()
    trained = [rows.rows[at] for each in sets.values() for at in each] if sets else rows.rows
    labels = [row.desirable for row in trained if isinstance(row, Unpaired)]
    if len(labels) < FEWEST_ROWS:
        raise UserError(
            f"`data.mix`: {len(labels)} row of {recipe.data.train} has a share. The KL of KTO is estimated from prompts before "
            f"the answers of other rows: give a share to sets of at least {FEWEST_ROWS} rows together."
        )
    kto, desirable = recipe.kto, sum(labels)
    ours, theirs = desirable * kto.desirable_weight, (len(labels) - desirable) * kto.undesirable_weight
    least, most = BALANCED
    if least * theirs <= ours <= most * theirs:
        return ()
    return (
        f"{desirable} answers are desirable, {len(labels) - desirable} are not: by kto.desirable_weight and "
        f"kto.undesirable_weight they count {ours:g} to {theirs:g}. KTO's paper keeps the first between 1 and 4/3 of the second",
    )


def check_margins(recipe: SupervisedRecipe, path: Path, rows: Rows) -> None:
    """Raises UserError for a pair with a margin where the loss looks at no lead. path: of the rows."""
    if not isinstance(recipe, DpoRecipe) or recipe.dpo.loss != "apo_zero":
        return
    for row in rows.rows:
        if isinstance(row, Pair) and row.margin:
            raise UserError(
                f"{place_of(path, row.chosen.id)}, field {recipe.data.margin_key!r}: dpo.loss apo_zero heeds no margin. "
                "It looks at each answer by itself: set another dpo.loss, or name a field in data.margin_key that no row has."
            )


def check_sets(recipe: Recipe, path: Path, rows: Sequence[Prompt], prompts: Sequence[Prompt]) -> None:
    """Raises UserError where held-out rows name no set or too many of them, and where one of eval.sets has no row.

    rows: of the file. prompts: those of them that are asked (`Eval.asked`): eval.max_prompts may leave out all of a set.
    """
    key, sets = recipe.eval.set_key, set()
    if key is None:
        return
    for prompt in prompts:
        name = prompt.metadata.get(key)
        if not isinstance(name, str) or not name.isprintable() or not name.strip():
            raise UserError(
                f"{place_of(path, prompt.id)}: its field {key!r}, which eval.set_key names, is {name!r}; wanted is the name of "
                "the row's set, a line of text. Give every held-out row one, or remove eval.set_key."
            )
        sets.add(name)
    if len(sets) > MOST_SETS:
        raise UserError(
            f"{path}: the field {key!r}, which eval.set_key names, has {len(sets)} different values, such as {min(sets)!r} and "
            f"{max(sets)!r}: each would be a set with metrics of its own, at most {MOST_SETS}. Name another field."
        )
    if unknown := sorted(name for name in recipe.eval.sets if not any(row.metadata.get(key) == name for row in rows)):
        raise UserError(
            f"`eval.sets`: no held-out row of {path} is of the set {unknown[0]!r}, by its field {key!r} (eval.set_key). Sets "
            f"that there are: {', '.join(sorted(sets))}."
        )


def check_best(recipe: Recipe, prompts: Sequence[Prompt]) -> None:
    """Raises UserError where checkpoints are to be kept by a set of held-out rows that has none."""
    metric = recipe.train.keep_best.metric if recipe.train.keep_best is not None else ""
    key, name = recipe.eval.set_key, set_of(metric)
    sets = {prompt.metadata[key] for prompt in prompts} if key is not None else set()
    if name is not None and name not in sets:
        raise UserError(
            f"`train.keep_best.metric` is {metric}, and no held-out row of {recipe.data.eval} is of the set {name!r}, by its "
            f"field {key!r} (eval.set_key). Sets that there are: {', '.join(sorted(sets))}. Name one of them, or remove "
            "train.keep_best."
        )


def check_best_label(recipe: SupervisedRecipe, held_out: Sequence[Rows]) -> None:
    """Raises UserError where checkpoints are to be kept by KTO's reward of a label that no held-out row has."""
    metric = recipe.train.keep_best.metric if recipe.train.keep_best is not None else ""
    labels = {row.desirable for rows in held_out for row in rows.rows if isinstance(row, Unpaired)}
    wanted = OF_LABEL.get(metric)
    if isinstance(recipe, KtoRecipe) and wanted is not None and wanted not in labels:
        raise UserError(
            f"`train.keep_best.metric` is {metric}, and no held-out row of {recipe.data.eval} is labelled "
            f"{str(wanted).lower()} in its field {recipe.data.label_key!r} (data.label_key): no step would be the best by it. "
            "Add such rows to data.eval, name another metric, as kto/eval_loss with mode min, or remove train.keep_best."
        )


def check_compared(recipe: Recipe, path: Path, prompts: Iterable[Prompt]) -> None:
    """Raises UserError for a row that a built-in rule grades, and whose answer it cannot compare with (`accepted`)."""
    for prompt in prompts:
        try:
            accepted(prompt.answer)
        except ValueError as error:
            if rules := compares_answers(recipe.reward, prompt.metadata):
                raise UserError(
                    f"{place_of(path, prompt.id)}: {error}, and {rules[0]} compares. Name the field with the text by "
                    "data.answer_key, a function of your own by reward.fn, or the rows that the rule is for by `only` of its "
                    "grader."
                ) from None


def check_graded(
    recipe: Recipe, prompts: Sequence[Prompt], held_out: Sequence[Prompt], sets: RowsBySet | None = None
) -> None:
    """Raises UserError for graders without rows and rows without graders, and where eval.grader does not grade all held-out ones.

    Of environments by the row the same. prompts: to train on; an evaluation has none. sets: which of them data.mix gives a share;
    without any, all are trained on.
    """
    trained = [prompts[at] for rows in sets.values() for at in rows] if sets else prompts
    ours = {id(row) for row in held_out}

    def place(row: Prompt) -> str:
        """Files of one name in two folders have rows of the same ids."""
        path = recipe.data.eval if id(row) in ours else recipe.data.train
        return row.id if path is None else place_of(path, row.id)

    if recipe.agent is not None:
        both = [*prompts, *held_out]
        check_kinds(recipe.agent, both, played=[*trained, *held_out], part=not prompts, place=place)
    for path, rows in ((recipe.data.train, prompts), (recipe.data.eval, held_out)):
        if path is not None:
            check_compared(recipe, path, rows)
    if recipe.reward_model is not None and recipe.reward_model.weight != 0:
        trained = ()  # it rewards these, and is not asked of held-out ones
    alone = () if recipe.agent is not None and recipe.agent.rewards else (*trained, *held_out)
    check_choice(recipe.reward, [*prompts, *held_out], alone=alone, part=not prompts, place=place)
    _check_judged(recipe, held_out, place)
    if recipe.agent is None:  # of an episode, what will have been said is not known
        check_rendered(recipe.reward, [*prompts, *held_out], place)


def _check_judged(recipe: Recipe, held_out: Sequence[Prompt], place: Callable[[Prompt], str]) -> None:
    """Raises UserError where the grader that says what is right does not grade a row. The key that names it is named."""
    for key, asked in recipe.eval.by_key().items():
        grader = asked.grader
        own = [row for row in held_out if recipe.eval.of_row(row.metadata) == asked]
        if grader is not None and (row := first_ungraded(recipe.reward, grader, own)) is not None:
            named = None if key == "eval" else recipe.eval.sets[key.removeprefix("eval.sets.")]
            of_all = named is None or named.grader is None
            instead = "the whole reward" if of_all or recipe.eval.grader is None else "eval.grader"
            raise UserError(
                f"`{'eval' if of_all else key}.grader`: {grader} does not grade every held-out row that it is named for: "
                f"reward.graders.{grader}.only leaves out {place(row)}, which would count as wrong. Remove the key: {instead} "
                "says then what is right."
            )


def row_notes(recipe: Recipe, model: ModelConfig, path: Path, prompts: PromptSet, tool_tokens: int) -> tuple[str, ...]:
    """Lines on rows that nothing can come of, or less than their model could."""
    return (
        *_without_answer(recipe, path, prompts),
        *_beside_tools(recipe, path, prompts, tool_tokens),
        *_without_images(recipe, model, path, prompts),
    )


def _without_images(recipe: Recipe, model: ModelConfig, path: Path, prompts: PromptSet) -> tuple[str, ...]:
    """A line where a model that sees is shown nothing: images may lie in another field."""
    key = recipe.data.images_key
    if model.vision is None or key is None or any(prompt.images for prompt in prompts.prompts):
        return ()
    others = sorted(name for name in prompts.prompts[0].metadata if name != MESSAGES_KEY)
    return (
        f"no row of {path} has an image in its field {key!r} (data.images_key): the model sees none of them. Further fields of "
        f"the first row: {some(others, MOST_SETS) or 'none'}",
    )


def _beside_tools(recipe: Recipe, path: Path, prompts: PromptSet, tool_tokens: int) -> tuple[str, ...]:
    """A line for prompts that are too long with what the model is told of its tools, where episodes begin with the row's."""
    most = recipe.data.max_prompt_tokens
    long = [each for each in prompts.prompts if len(each.token_ids) + tool_tokens > most]
    if not tool_tokens or not long or (recipe.agent is not None and recipe.agent.has_environment):
        return ()
    return (
        f"{len(long)} rows are over data.max_prompt_tokens {most} with what the model is told of its tools, {tool_tokens} "
        f"tokens: their episodes fail. Raise it; the first: {place_of(path, long[0].id)}",
    )


def _without_answer(recipe: Recipe, path: Path, prompts: PromptSet) -> tuple[str, ...]:
    """A line for rows that the recipe's built-in rules find no response right by."""
    found = [(prompt, compares_answers(recipe.reward, prompt.metadata)) for prompt in prompts.without_answer]
    empty = [(prompt, rules[0]) for prompt, rules in found if rules]
    if not empty:
        return ()
    prompt, rule = empty[0]
    first = place_of(path, prompt.id)
    return (f"{len(empty)} rows have an empty answer, by which {rule} finds no response right; the first: {first}",)
