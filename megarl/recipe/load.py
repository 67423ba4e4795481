"""Reads a recipe: a YAML file over its one base, `key.path=value` of the command line over both, into a frozen Recipe.

    base: common.yaml        # optional; relative to this file; a base may not have a base
    train: {steps: 100}

Sections are merged key by key, lists and single values are replaced. Every other path in a recipe is relative to the
folder that megarl is called in, as on any command line. `${NAME}` in a value is the environment's variable, `$${` a plain
`${`. What is wrong is said with file, line and key, all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, overload

from pydantic import ValidationError

from megarl.core.errors import UserError
from megarl.core.words import did_you_mean
from megarl.recipe.check import check_recipe, fill_defaults, unread_keys
from megarl.recipe.explain import explain
from megarl.recipe.presets import PRESETS
from megarl.recipe.schema import AnyRecipe, Recipe, RecipeT
from megarl.recipe.source import Tree, read_override, read_tree
from megarl.recipe.supervised import DpoRecipe, KtoRecipe, RmRecipe, SftRecipe

# By the command that runs them.
KINDS: Mapping[str, type[AnyRecipe]] = MappingProxyType(
    {"train": Recipe, "sft": SftRecipe, "rm": RmRecipe, "dpo": DpoRecipe, "kto": KtoRecipe}
)
# The section that only this kind has, and has to have; what has none of them is for sft.
OWN_SECTIONS: Mapping[str, type[AnyRecipe]] = MappingProxyType(
    {"rollout": Recipe, "rm": RmRecipe, "dpo": DpoRecipe, "kto": KtoRecipe}
)


@dataclass(frozen=True)
class Loaded(Generic[RecipeT]):
    """A recipe with where it came from.

    resolved: every key that is read in this configuration, defaults filled in; loads back to the same recipe.
    sources: dotted path of every value that was given, to where: `recipes/a.yaml:12` or `on the command line`.
    names: what stands in `resolved` where the recipe has a folder or a file in the place of a name (hub/recipe.py), by key.
    commits: name, revision and commit of what the hub gave, by key. recorded: as `load_recipe` was told.
    """

    recipe: RecipeT
    resolved: dict[str, Any]
    sources: dict[str, str]
    path: Path
    overrides: tuple[str, ...]
    names: Mapping[str, str] = field(default_factory=dict)
    commits: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    recorded: bool = False

    def with_recipe(self, recipe: RecipeT) -> Loaded[RecipeT]:
        """The same, with what a search or the hub has decided in it."""
        return replace(self, recipe=recipe, resolved=resolve(_named(recipe, self.names)))

    def with_names(self) -> RecipeT:
        """The recipe as a run's folder has it: with names, at their commits, in the place of what they stand for."""
        return _named(self.recipe, self.names)


@overload
def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Loaded[Recipe]: ...
@overload
def load_recipe(
    path: Path, overrides: Sequence[str], kind: type[RecipeT], *, recorded: bool = ...
) -> Loaded[RecipeT]: ...
def load_recipe(
    path: Path, overrides: Sequence[str] = (), kind: Any = Recipe, *, recorded: bool = False
) -> Loaded[Any]:
    """Read, validate and check a recipe of that kind. Raises UserError that lists everything wrong with it.

    recorded: a run has written the file, every default in it: its values are no more than defaults to what overrides give. A
    preset among these goes over them, and what they leave unread is no mistake.
    """
    tree = _read(path, overrides, recorded=recorded)
    try:
        recipe = kind.model_validate(tree.values)
    except ValidationError as error:
        _refuse_other_kind(path, tree, kind)
        raise UserError(_problems(path, explain(error.errors(), tree, kind))) from None
    sources = {".".join(keys): str(tree.origins[keys]) for keys in tree.given()}
    problems = [*_vain(recipe, tree), *check_recipe(recipe, sources, recorded=recorded)]
    if problems:
        raise UserError(_problems(path, problems))
    recipe = fill_defaults(recipe)
    return Loaded(recipe, resolve(recipe), sources, path, tuple(overrides), recorded=recorded)


def _vain(recipe: AnyRecipe, tree: Tree) -> Iterator[str]:
    """What is wrong with nulls that take back a name of a section of names which has none of that name."""
    for keys, origin in tree.vain.items():
        section: Any = recipe
        for key in keys[:-1]:
            section = section.get(key) if isinstance(section, Mapping) else getattr(section, key, None)
        if isinstance(section, Mapping) and keys[-1] not in section:
            hint = did_you_mean(keys[-1], section, quoted=True)
            there = f"Names that there are: {', '.join(section)}" if section else "There are no names"
            yield f"`{'.'.join(keys)}` ({origin}): null takes back a name, and there is no {keys[-1]!r}.{hint} {there}."


def detect_kind(path: Path, overrides: Sequence[str] = ()) -> type[AnyRecipe]:
    """Which command a file is a recipe for."""
    return _kind_of(_read(path, overrides))


def command_of(kind: type[AnyRecipe]) -> str:
    """The command that runs such recipes: `train`, `sft`, `rm`, `dpo` or `kto`."""
    return next(command for command, each in KINDS.items() if each is kind)


def _kind_of(tree: Tree) -> type[AnyRecipe]:
    return next((kind for section, kind in OWN_SECTIONS.items() if section in tree.values), SftRecipe)


def _named(recipe: RecipeT, names: Mapping[str, str]) -> RecipeT:
    """The recipe with names in the place of what they stand for."""
    for key, value in names.items():
        recipe = with_path(recipe, key, Path(value))
    return recipe


def with_path(section: Any, key: str, path: Path) -> Any:
    """A section, or sections by name, with another path where the dotted key says."""
    name, _, below = key.partition(".")
    if isinstance(section, Mapping):
        return {**section, name: with_path(section[name], below, path) if below else path}
    value = with_path(getattr(section, name), below, path) if below else path
    return section.model_copy(update={name: value})


def resolve(recipe: AnyRecipe) -> dict[str, Any]:
    """The recipe as plain values, defaults filled in, without the keys that nothing reads in this configuration."""
    values: dict[str, Any] = recipe.model_dump(mode="json")
    for dotted in unread_keys(recipe):
        *sections, name = dotted.split(".")
        section = values
        for key in sections:
            section = (
                section.get(key) or {}
            )  # a rule about a section within one that nothing reads, or that is not there
        section.pop(name, None)
    return {name: section for name, section in values.items() if section != {}}


def _read(path: Path, overrides: Sequence[str], *, recorded: bool = False) -> Tree:
    tree = read_tree(path)
    if recorded:
        _forget_whitening(tree)
    for text in overrides:
        tree.merge(read_override(text))
    _expand_preset(tree, recorded=recorded)
    return tree


def _forget_whitening(tree: Tree) -> None:
    """Of GAE's advantages it is the default, which a run writes down; it is not meant for another one that overrides name."""
    algorithm = tree.values.get("algorithm", {})
    if algorithm.get("advantage") == "gae" and algorithm.get("whiten") is True:
        del algorithm["whiten"], tree.origins["algorithm", "whiten"]


def _expand_preset(tree: Tree, *, recorded: bool) -> None:
    """Put the settings of algorithm.preset under those that were given. Raises UserError for a name that is none.

    recorded: those of the file count as given only where the preset is the file's too.
    """
    section = tree.values.get("algorithm")
    name = section.get("preset") if isinstance(section, dict) else None
    if section is None or not isinstance(name, str):
        return
    if name not in PRESETS:
        hint = did_you_mean(name.lower().replace("-", "_"), PRESETS)
        where = tree.origin(("algorithm", "preset"))
        raise UserError(f"`algorithm.preset` ({where}): there is no {name!r}.{hint} Presets: {', '.join(PRESETS)}.")
    given = section
    if recorded and tree.origins["algorithm", "preset"].file is None:
        given = {key: value for key, value in section.items() if tree.origins["algorithm", key].file is None}
    tree.values["algorithm"] = {**section, **PRESETS[name], **given}


def _refuse_other_kind(path: Path, tree: Tree, kind: type[AnyRecipe]) -> None:
    other = _kind_of(tree)
    if other is kind:
        return
    try:
        other.model_validate(tree.values)
    except ValidationError:
        return  # of no kind: what is wrong with it for this one is said
    right, wrong = (f"megarl {command_of(each)}" for each in (other, kind))
    own = next(
        (f" Recipes for `{wrong}` have a section `{name}`." for name, each in OWN_SECTIONS.items() if each is kind), ""
    )
    raise UserError(f"{path} is a recipe for `{right}`, not for `{wrong}`. Run `{right} {path}`.{own}")


def _problems(path: Path, problems: list[str]) -> str:
    if len(problems) == 1:
        return f"The recipe {path} cannot run. {problems[0]}"
    return f"The recipe {path} cannot run, for {len(problems)} reasons." + "".join(f"\n  - {each}" for each in problems)
