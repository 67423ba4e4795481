"""The rules about what every Megatron role has: its layout and its optimizer, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megarl.recipe.functions import Asked
from megarl.recipe.roles import Optimizer, Parallel
from megarl.recipe.rule import RL, Contradiction, Unread
from megarl.recipe.schema import AnyRecipe, Recipe
from megarl.recipe.supervised import DpoRecipe, KtoRecipe, SupervisedRecipe

Kinds = tuple[type[AnyRecipe], ...]
LAID_OUT: dict[str, Kinds] = {
    "actor": (Recipe, SupervisedRecipe),
    "reference": (Recipe, DpoRecipe, KtoRecipe),
    "critic": RL,
    "reward_model": RL,
    "teacher": RL,
}
LEARNING: dict[str, Kinds] = {"actor": (Recipe, SupervisedRecipe), "critic": (Recipe,)}


def _parallel(role: str, holds: Callable[[Parallel], bool]) -> Callable[[AnyRecipe, Asked], bool]:
    """Whether it holds of a role's own layout; so it does where the role has none."""

    def read(recipe: AnyRecipe, _: Asked) -> bool:
        section = getattr(recipe, role)
        return section is None or section.parallel is None or holds(section.parallel)

    return read


def _optimizer(role: str, holds: Callable[[Optimizer], bool]) -> Callable[[AnyRecipe, Asked], bool]:
    """Whether it holds of a role's optimizer; so it does where there is no such role."""

    def read(recipe: AnyRecipe, _: Asked) -> bool:
        section = getattr(recipe, role)
        return section is None or holds(section.optimizer)

    return read


def _layout_rules() -> Iterator[Unread]:
    for role, kinds in LAID_OUT.items():
        yield Unread(
            (f"{role}.parallel.sequence_parallel",),
            _parallel(role, lambda parallel: parallel.tp > 1),
            f"it cuts activations over tensor-parallel ranks: set {role}.parallel.tp to 2 or more",
            kinds,
        )


def _recompute_rules() -> Iterator[Unread]:
    for role, kinds in LEARNING.items():

        def read(recipe: AnyRecipe, _: Asked, role: str = role) -> bool:
            section = getattr(recipe, role)
            return section is None or section.recompute == "full"

        yield Unread(
            (f"{role}.recompute_num_layers",),
            read,
            f"it says how many are recomputed whole: set {role}.recompute to full",
            kinds,
        )


def _optimizer_rules() -> Iterator[Unread]:
    for role, kinds in LEARNING.items():
        section = f"{role}.optimizer"
        yield Unread(
            (f"{section}.beta1", f"{section}.beta2", f"{section}.eps"),
            _optimizer(role, lambda optimizer: optimizer.name == "adam"),
            f"only Adam has it: set {section}.name to adam",
            kinds,
        )
        yield Unread(
            (f"{section}.momentum",),
            _optimizer(role, lambda optimizer: optimizer.name == "sgd"),
            f"only SGD has it: set {section}.name to sgd",
            kinds,
        )
        yield Unread(
            (f"{section}.min_lr",),
            _optimizer(role, lambda optimizer: optimizer.schedule != "constant"),
            f"a constant schedule never goes down: set {section}.schedule to linear or cosine",
            kinds,
        )
    yield Unread(
        ("actor.optimizer.freeze_router",),
        lambda r, _: r.actor.lora is None,
        "adapters alone are trained: remove actor.lora",
        LEARNING["actor"],
    )


def _schedule_rule(role: str, kinds: Kinds) -> Contradiction:
    rises = _optimizer(role, lambda optimizer: optimizer.schedule == "constant" or optimizer.min_lr <= optimizer.lr)

    def says(recipe: AnyRecipe) -> str:
        optimizer: Optimizer = getattr(recipe, role).optimizer
        return (
            f"a schedule goes down from {role}.optimizer.lr {optimizer.lr:g} to min_lr, and {optimizer.min_lr:g} is above "
            f"it. Set it to at most {optimizer.lr:g}"
        )

    return Contradiction(f"{role}.optimizer.min_lr", lambda r, asked: not rises(r, asked), says, kinds)


def _rewind_rule(role: str, kinds: Kinds) -> Contradiction:
    stays = _optimizer(role, lambda optimizer: optimizer.on_bad_gradient != "rewind")

    def wrong(recipe: AnyRecipe, asked: Asked) -> bool:
        return not stays(recipe, asked) and not (isinstance(recipe, Recipe) and recipe.train.journal)

    def says(recipe: AnyRecipe) -> str:
        if isinstance(recipe, Recipe):
            return "what a run goes back over is written in its journal, and train.journal is false: set it to true"
        return "a supervised run has no journal, in which it would be written what it goes back over: set it to stop or skip"

    return Contradiction(f"{role}.optimizer.on_bad_gradient", wrong, says, kinds)


def _warmup_rule(role: str, kinds: Kinds) -> Contradiction:
    one = _optimizer(role, lambda optimizer: not (optimizer.warmup_steps and optimizer.warmup_share))
    return Contradiction(
        f"{role}.optimizer.warmup_share",
        lambda r, asked: not one(r, asked),
        lambda _: f"{role}.optimizer.warmup_steps says how long warm-up is, too. Remove one of the two",
        kinds,
    )


def _served(recipe: Recipe) -> bool:
    """Whether the teacher is behind an address."""
    return recipe.teacher is not None and recipe.teacher.servers is not None


def _both(recipe: Recipe) -> list[str]:
    """Addresses of servers that are the teacher's and the policy's."""
    if recipe.teacher is None or recipe.teacher.servers is None or isinstance(recipe.rollout.servers, int):
        return []
    return [url for url in recipe.teacher.servers.urls if url in recipe.rollout.servers.urls]


ROLE_UNREAD: tuple[Unread, ...] = (
    *_layout_rules(),
    *_recompute_rules(),
    *_optimizer_rules(),
    Unread(
        ("teacher.parallel", "teacher.offload"),
        lambda r, _: not _served(r),
        "no rank holds a teacher that is served: name its folder in teacher.path, in the place of teacher.servers",
        RL,
    ),
)
ROLE_CONTRADICTIONS: tuple[Contradiction, ...] = (
    *(rule(role, kinds) for role, kinds in LEARNING.items() for rule in (_schedule_rule, _rewind_rule, _warmup_rule)),
    Contradiction(
        "actor.optimizer.freeze_router",
        lambda r, _: r.actor.optimizer.freeze_router and r.actor.aux_loss_coef > 0,
        lambda _: (
            "actor.aux_loss_coef has routers balance their experts, and frozen ones cannot. Set that to 0, or this to false"
        ),
        LEARNING["actor"],
    ),
    Contradiction(
        "actor.optimizer.freeze_vision_tower",
        lambda r, _: r.actor.lora is not None and not r.actor.optimizer.freeze_vision_tower,
        lambda _: (
            "under actor.lora adapters alone learn, and the vision tower has none. Set it to true, or remove actor.lora"
        ),
        LEARNING["actor"],
    ),
    Contradiction(
        "teacher.path",
        lambda r, _: r.teacher is not None and r.teacher.path is None and r.teacher.servers is None,
        lambda _: "it is missing. Name the teacher's folder, or in teacher.servers where it is served",
        RL,
    ),
    Contradiction(
        "teacher.servers",
        lambda r, _: _served(r) and r.teacher.path is not None,
        lambda _: "teacher.path has the teacher on the run's ranks. Remove one of the two",
        RL,
    ),
    Contradiction(
        "teacher.servers",
        lambda r, _: bool(_both(r)),
        lambda r: (
            f"{', '.join(_both(r))} is among rollout.servers.urls, too: it gets the policy's weights, which would be their own "
            "teacher. Name other servers"
        ),
        RL,
    ),
    Contradiction(
        "teacher.servers",
        lambda r, _: _served(r) and r.rollout.temperature != 1.0,
        lambda r: (
            "SGLang says log-probs of given tokens at temperature 1 alone, and those of the policy are at rollout.temperature "
            f"{r.rollout.temperature:g}. Set that to 1, or have the teacher on the run's ranks: teacher.path"
        ),
        RL,
    ),
)
