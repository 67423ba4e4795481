"""Each page for a newcomer is followed to the letter, with a tiny model in the place of a real one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from megarl.command_line import app
from megarl.recipe.load import load_recipe
from tests.docs.pages import DOCS, ROOT, blocks, commands, follow
from tests.support.dry.world import SIZES
from tests.support.tiny import write_tiny_model

FOLLOWED = ("data", "rewards", "agents", "models", "coming_from", "reading_a_run", "errors")

CONVERTS = ("models",)  # by processes of their own


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages call models/mine."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "mine", **SIZES | {"max_position_embeddings": 2048})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in CONVERTS)) for name in FOLLOWED]
)
def test_a_page_does_what_it_says(name: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").symlink_to(model)
    assert follow((DOCS / f"{name}.md").read_text(), tmp_path) > 0


REST = """\
model: {path: models/mine}
data: {train: data/train.jsonl, eval: data/eval.jsonl}
rollout: {prompts_per_step: 8, samples_per_prompt: 4, max_response_tokens: 64}
algorithm: {kl_coef: 0.1}
train: {steps: 1}
"""


def test_an_excerpt_of_a_recipe_is_accepted_in_a_whole_one(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    excerpts = [
        block.text
        for name in FOLLOWED
        for block in blocks((DOCS / f"{name}.md").read_text())
        if block.language == "yaml" and block.name is None
    ]
    assert len(excerpts) >= 2
    for text in excerpts:
        recipe.write_text(REST + text)
        load_recipe(recipe)


def given() -> list[tuple[str, str]]:
    """Every call of megarl in a block of any page, and where."""
    found = []
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        for block in blocks(path.read_text()):
            if block.language == "console":
                lines = [command.line for command in commands(block.text)]
            elif block.language in ("", "bash", "sh"):
                lines = block.text.replace("\\\n", " ").splitlines()
            else:
                continue
            found += [(path.name, line) for line in lines if line.startswith("megarl ")]
    return found


def test_every_call_on_any_page_is_one_that_the_command_line_takes() -> None:
    calls = given()
    assert len({page for page, _ in calls}) > len(FOLLOWED)
    for page, line in calls:
        arguments = shlex.split(re.sub(r"\s#.*| \[[^]]*\]|\.\.\.", "", line))[1:]
        command, name, context = typer.main.get_command(app), "megarl", None
        while isinstance(command, TyperGroup):
            context = command.context_class(command, parent=context, info_name=name)
            name, command, arguments = command.resolve_command(context, arguments)
        try:
            assert command is not None and name is not None
            with command.make_context(name, arguments, parent=context):
                pass
        except Exception as error:
            raise AssertionError(f"{page}: {line}: {error}") from error
