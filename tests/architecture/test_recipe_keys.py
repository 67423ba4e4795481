"""Every key of the recipe is read by some code: a key that is written in a recipe and read nowhere is a lie."""

from __future__ import annotations

import ast

from megarl.recipe.explain import Schema
from megarl.recipe.load import KINDS
from tests.architecture.source import modules

SCHEMA = {
    f"megarl.recipe.{name}" for name in ("schema", "algorithm", "reward", "roles", "run", "section", "supervised")
}
# The rules about keys read them only to say that something else does.
RULES = {"megarl.recipe.check", "megarl.recipe.rules"}


def test_every_key_is_read_outside_the_schema_and_its_rules() -> None:
    read = {
        node.attr
        for name, tree in modules().items()
        if name not in SCHEMA | RULES
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    # The run's folder is put together from run.dir and run.name by the schema itself.
    read |= {"dir", "name"} if "folder" in read else set()
    # A preset is read before there is a recipe: its settings are put under those that were given.
    read |= {"preset"}
    unread = {".".join(keys) for kind in KINDS.values() for keys in Schema(kind).leaves() if keys[-1] not in read}
    assert unread == set()
