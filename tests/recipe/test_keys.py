"""Every key that a recipe may have does something, in whatever configuration it is accepted, or is refused with the reason.

A key is given another value, and the run is gone through in this process: the driver as it is, real losses, the
collector with a client that answers at once, Megatron on one rank (tests/support/dry). What comes of it has to differ.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from megarl.core.errors import UserError
from megarl.recipe import source
from megarl.recipe.explain import ANY_NAME, Schema
from megarl.recipe.load import KINDS, _read, load_recipe
from megarl.run import journal
from megarl.run.preflight import preflight
from tests.recipe.key_cases import CONTEXTS, NEVER, SWEEPS, VALUES, WITHOUT_EFFECT
from tests.support.dry import driver
from tests.support.dry.actors import Book
from tests.support.dry.engine import Engines
from tests.support.dry.world import write_world


@dataclass
class Runs:
    """Goes through runs of recipes in a world, and remembers those of the configurations."""

    root: Path
    engines: Engines
    known: dict[tuple[str, str], Seen] = field(default_factory=dict)
    given: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def value(self, command: str, overrides: Sequence[str], key: str) -> Any:
        """What a key is given, or is by default, before anything is made of the recipe."""
        given = command, *overrides
        if given not in self.given:
            tree = _read(self.root / f"{command}.yaml", self._filled(overrides))
            try:
                self.given[given] = KINDS[command].model_validate(tree.values)
            except ValidationError as error:
                self.given[given] = str(error)  # no recipe at all
        recipe = self.given[given]
        return recipe if isinstance(recipe, str) else value_at(recipe, key.split("."))

    def _filled(self, overrides: Sequence[str]) -> list[str]:
        return [text.replace("{root}", str(self.root)) for text in overrides]

    def of(self, command: str, overrides: Sequence[str], unlike: Seen | None = None) -> Seen:
        """unlike: where the two differ, this one ends early. Raises UserError where the recipe is refused."""
        book, left = self._run(command, overrides, unlike=unlike and unlike.book.told)

        def resume() -> Any:
            self._run(command, overrides)
            self._run(command, [*overrides, "train.steps=5"], resume=True)
            book, left = self._run(command, [*overrides, "train.steps=6"], resume=True)
            return book.told, left

        return Seen(book, left, self.engines, resume)

    def _run(
        self, command: str, overrides: Sequence[str], *, resume: bool = False, unlike: Any = None
    ) -> tuple[Book, Any]:
        folders = [self.root / name for name in ("runs", "elsewhere")]
        for folder in [] if resume else folders:
            shutil.rmtree(folder, ignore_errors=True)
        recipe, given = self.root / f"{command}.yaml", self._filled(overrides)
        book = driver.run(KINDS[command], recipe, given, self.root, resume=resume, unlike=unlike)
        return book, [driver.left(folder) for folder in folders]

    def of_context(self, command: str, context: str) -> Seen:
        """The run of a configuration as it is."""
        key = command, context
        if key not in self.known:
            self.known[key] = self.of(command, CONTEXTS[command][context])
        return self.known[key]


@dataclass
class Seen:
    """What came of a run. resume: goes on with it, twice, and says what came of that."""

    book: Book
    left: list[Any]
    engines: Engines
    resume: Callable[[], Any]

    def __eq__(self, other: object) -> bool:
        """What takes longest is looked at last."""
        assert isinstance(other, Seen)
        if (self.book.told, self.left) != (other.book.told, other.left):
            return False
        if self.engines.facts(self.book.specs) != self.engines.facts(other.book.specs):
            return False
        bad = self.engines.with_bad_gradients
        return bad(self.book.specs) == bad(other.book.specs) and self.resume() == other.resume()


@contextmanager
def runs_in(root: Path) -> Iterator[Runs]:
    """A world to go through runs in, written into a folder."""
    write_world(root)
    engines = Engines(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADER_KEY", "secret")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        # The same for every run: the recipes in the world and its models, what is installed, and which keys samples depend on.
        first = source._read_file
        read = cache(lambda *where: pickle.dumps(first(*where)))
        patch.setattr(source, "_read_file", lambda *where: pickle.loads(read(*where)))
        for name in ("installed", "fingerprint", "_harmless"):
            patch.setattr(journal, name, cache(getattr(journal, name)))
        yield Runs(root, engines)
    engines.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with runs_in(tmp_path_factory.mktemp("world")) as runs:
        yield runs


def keys_of(command: str) -> list[str]:
    """Every key; those of a grader stand under the name of its kind."""
    leaves = Schema(KINDS[command]).leaves()
    return [".".join(name for name in leaf if name != ANY_NAME) for leaf in leaves]


def contexts_of(command: str, key: str) -> list[str]:
    """The configurations that a key is tried in."""
    section = max((name for name in SWEEPS if key == name or key.startswith(f"{name}.")), key=len, default="")
    return [name for name in SWEEPS.get(section, ("plain",)) if name in CONTEXTS[command]]


@pytest.mark.parametrize("context", ["graders", "agent with tools"])
def test_a_run_goes_the_same_way_each_time(runs: Runs, context: str) -> None:
    """What is timed may not count, or a key does something wherever the machine was busy."""
    once, again = runs.of_context("train", context), runs.of("train", CONTEXTS["train"][context])
    assert (once.book.told, once.left) == (again.book.told, again.left)


@pytest.mark.parametrize("command", KINDS)
def test_every_key_has_a_value_to_try(command: str) -> None:
    assert set(keys_of(command)) == set(VALUES[command])
    assert set(NEVER[command]) <= set(VALUES[command])


# The same section, in the same hands, is gone through in all its configurations for `sft`, and for the actor of `train`.
OF_SFT = ("actor.", "cluster.", "deadlines.", "model.", "report.", "run.", "train.")
SEEN_ELSEWHERE = [
    # But for dpo's `train.`: what is best has other names where pairs are scored.
    *((command, name) for command in ("rm", "dpo", "kto") for name in OF_SFT if (command, name) != ("dpo", "train.")),
    *((command, "reference.parallel.") for command in ("dpo", "kto")),
    *(("train", f"{role}.parallel.") for role in ("reference", "critic", "reward_model", "teacher")),
    ("train", "critic.optimizer."),
]
SECTIONS = [
    (command, section) for command in KINDS for section in dict.fromkeys(key.split(".")[0] for key in keys_of(command))
]


@pytest.mark.parametrize(("command", "section"), SECTIONS, ids=lambda name: name)
def test_every_accepted_key_changes_something(runs: Runs, command: str, section: str) -> None:
    dead, unused = [], []
    for key in (each for each in keys_of(command) if each.split(".")[0] == section):
        alive = False
        for context, overrides in others(runs, command, key):
            if alive and any(command == other and key.startswith(prefix) for other, prefix in SEEN_ELSEWHERE):
                break
            before = runs.of_context(command, context)
            try:
                after = runs.of(command, overrides, before)
            except UserError:
                continue
            alive = True
            if after == before:
                dead.append(f"{overrides[-1]} in {context!r}")
        if alive == (key in NEVER[command]):
            unused.append(key)

    assert dead == [], "accepted, and nothing differs: add a rule that refuses it with the reason"
    assert unused == [], "never accepted, or said to be and is not"


def others(runs: Runs, command: str, key: str) -> Iterator[tuple[str, list[str]]]:
    """Configurations by name, each with overrides that give the key another value than it has there."""
    for context in contexts_of(command, key):
        before = list(CONTEXTS[command][context])
        for value in VALUES[command][key]:
            after = [*before, f"{key}={value}"]
            if runs.value(command, after, key) != runs.value(command, before, key):
                yield context, after


def value_at(section: Any, names: Sequence[str]) -> Any:
    """The value of a key, its default where the section is not there; None where it has to be given."""
    if not names:
        return section
    if isinstance(section, dict):
        return value_at(section[names[0]], names[1:]) if names[0] in section else None
    field = type(section).model_fields[names[0]]
    value = getattr(section, names[0], None)
    if names[1:] and not isinstance(value, (BaseModel, dict)):
        named = [getattr(kind, "__origin__", kind) for kind in get_args(field.annotation)]
        kinds = [kind for kind in named if isinstance(kind, type) and issubclass(kind, BaseModel)]
        value = kinds[0].model_construct()
    return value_at(value, names[1:])


@pytest.mark.parametrize(("key", "platform"), WITHOUT_EFFECT.items())
def test_what_a_platform_goes_through_in_vain_is_said_at_the_start(runs: Runs, key: str, platform: str) -> None:
    notes = {}
    for name in ("cpu", "cuda"):
        overrides = [
            "run.name=new",
            "model.dtype=bfloat16",
            f"cluster.platform={name}",
            f"{key}={VALUES['train'][key][0]}",
        ]
        recipe = load_recipe(runs.root / "train.yaml", overrides).recipe
        notes[name] = [line for line in preflight(recipe, here=False).lines() if line.startswith(key)]
    assert {name: bool(lines) for name, lines in notes.items()} == {name: name == platform for name in notes}
    assert "no effect on" in notes[platform][0]
