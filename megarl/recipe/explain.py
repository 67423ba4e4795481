"""Turns what pydantic found wrong in a recipe into sentences: where it stands, what was given, what is allowed."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from megarl.recipe.glossary import RENAMED, Meant, meant_by
from megarl.recipe.section import A_SECTION, A_VALUE
from megarl.recipe.source import Keys, Tree

MOST_NAMED = 6  # keys of another system's section that a message translates
ANY_NAME = "NAME"  # stands for a key that users choose
# What stands behind a key that takes one of several: sections' own marks, and pydantic's.
_OPTION = re.compile(rf"{re.escape(A_VALUE)}|{re.escape(A_SECTION)}|literal\[.*\]|constrained-\w+")
_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
    "path": "a path",
}
_WHOLE = re.compile(r"\d+")
_NUMBER = re.compile(r"[-+]?(0|[1-9]\d*)(\.\d*)?([eE][-+]?\d+)?")
# What values are called elsewhere, where no spelling is near ours, or another is nearer.
_SYNONYMS = {
    "gpu": "cuda",
    "GPU": "cuda",
    "fp32": "float32",
    "bf16": "bfloat16",
    "half": "bfloat16",
    "fp16": "bfloat16",
}
_GIVEN = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a section",
}


class Schema:
    """A recipe's schema as a tree of JSON schema nodes, with look-ups by path."""

    def __init__(self, kind: type[BaseModel], noun: str = "A recipe") -> None:
        """noun: what has these keys, for people."""
        self.noun = noun
        self._root = _json_schema(kind)
        self._definitions = self._root.get("$defs", {})

    def node(self, keys: Keys) -> dict[str, Any] | None:
        """The schema of the key at that path, or None where there is none."""
        node: dict[str, Any] | None = self._root
        for key in keys:
            if node is None:
                return None
            node = self._below(node, key)
        return node

    def children(self, keys: Keys) -> list[str]:
        """Names of the keys of a section; of one that comes in kinds, the kinds; where users choose the names, a stand-in."""
        node = self.node(keys)
        if node is None:
            return []
        each = self._section(node).get("additionalProperties")
        names = [ANY_NAME] if isinstance(each, dict) and "discriminator" in each else []
        return names or list(_kinds(node)) or list(self._section(node).get("properties", {}))

    def written(self, keys: Keys) -> Keys:
        """The path as a recipe has it: without the kinds that stand between a section and its keys."""
        return tuple(key for index, key in enumerate(keys) if key not in _kinds(self.node(keys[:index]) or {}))

    def knows(self, keys: Keys) -> bool:
        """Whether a recipe may have such a key; NAME in it stands for one that users choose."""
        return self.node(keys) is not None or any(self.written(leaf) == keys for leaf in self.leaves())

    def leaves(self, keys: Keys = ()) -> Iterator[Keys]:
        """Paths of all keys that hold a value, those that may hold a section instead before the keys of this section."""
        children = self.children(keys)
        if not children or _either(self.node(keys) or {}):
            yield keys
        for child in children:
            yield from self.leaves((*keys, child))

    def allowed(self, keys: Keys) -> str:
        """What may stand there, in words."""
        node = self.node(keys)
        return "something else" if node is None else self._words(node)

    def choices(self, keys: Keys) -> list[str]:
        """The words that may stand there, or in the list that does."""
        node = self.node(keys) or {}
        options = [node, *node.get("anyOf", ()), node.get("items", {}), *node.get("items", {}).get("anyOf", ())]
        return [str(each) for option in options for each in option.get("enum") or [option.get("const")] if each]

    def meaning(self, keys: Keys) -> str:
        """The key's description."""
        return str((self.node(keys) or {}).get("description", ""))

    def _below(self, node: dict[str, Any], key: str) -> dict[str, Any] | None:
        if kinds := _kinds(node):
            return {"$ref": kinds[key]} if key in kinds else None
        section = self._section(node)
        item: dict[str, Any] = section.get("items") or {}
        if "$ref" in item and key.isdigit():  # a list of sections
            return item
        each = section.get("additionalProperties")
        below: dict[str, Any] | None = section.get("properties", {}).get(key, each if isinstance(each, dict) else None)
        return below

    def _section(self, node: dict[str, Any]) -> dict[str, Any]:
        """The node itself, or the section that it refers to."""
        for candidate in (node, *_either(node), *node.get("anyOf", ()), *node.get("allOf", ())):
            if "$ref" in candidate:
                definition: dict[str, Any] = self._definitions[candidate["$ref"].rpartition("/")[2]]
                return definition
        return node

    def _words(self, node: dict[str, Any]) -> str:
        if options := node.get("anyOf") or _either(node):
            return " or ".join(self._words(option) for option in options)
        if kinds := _kinds(node):
            return f"a section with {node['discriminator']['propertyName']}: {' or '.join(kinds)}"
        if section := self._section(node).get("properties"):
            return f"a section with the keys {', '.join(section)}"
        if choices := node.get("enum") or ([node["const"]] if "const" in node else None):
            return " or ".join(map(str, choices))
        if each := node.get("items") or node.get("additionalProperties"):
            value = "any value" if each is True else self._words(each)
            return f"a {'list of' if 'items' in node else 'section of names, each with'} {value}"
        bounds = (
            ("exclusiveMinimum", "over"),
            ("minimum", "at least"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
        )
        words = [f"{word} {node[name]:.10g}" for name, word in bounds if name in node]
        words += [f"that matches {node['pattern']}"] if "pattern" in node else []
        kind = node.get("format") or node.get("type", "")
        return " ".join([_TYPES.get(kind, "something else"), " and ".join(words)]).strip()


@cache  # it takes longer than all else that is said of a wrong recipe
def _json_schema(kind: type[BaseModel]) -> dict[str, Any]:
    return kind.model_json_schema()


def _kinds(node: dict[str, Any]) -> dict[str, str]:
    """Kinds of a section to their definitions; empty where it has no kinds."""
    kinds: dict[str, str] = node.get("discriminator", {}).get("mapping", {})
    return kinds


def _either(node: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """What a key takes that holds a value or a section (recipe/section.py); empty for every other."""
    return () if "discriminator" in node else tuple(node.get("oneOf", ()))


def explain(errors: list[ErrorDetails], tree: Tree, kind: type[BaseModel], noun: str = "A recipe") -> list[str]:
    """One sentence or two for each error, in the order of the schema. noun: what has these keys."""
    schema = Schema(kind, noun)
    return list(dict.fromkeys(_explain(error, tree, schema) for error in errors))


def nearest(keys: Keys, schema: Schema) -> str | None:
    """The dotted path that was probably meant by one that does not exist."""
    section, name = keys[:-1], keys[-1]
    leaves = list(schema.leaves())
    same_name = [leaf for leaf in leaves if leaf[-1] == name]
    # A name that is right but in another place is likelier than one that is like a neighbour's.
    siblings = difflib.get_close_matches(name, schema.children(section), n=1, cutoff=0.85 if same_name else 0.6)
    if siblings:
        return ".".join(schema.written((*section, siblings[0])))
    candidates = [".".join(schema.written(leaf)) for leaf in same_name or leaves]
    close = difflib.get_close_matches(".".join(keys), candidates, n=1, cutoff=0.0 if same_name else 0.7)
    return close[0] if close else None


def _explain(error: ErrorDetails, tree: Tree, schema: Schema) -> str:
    keys = tuple(str(part) for part in error["loc"] if not _OPTION.fullmatch(str(part)))
    written = schema.written(keys)
    dotted = ".".join(written)
    if error["type"] == "missing":
        meaning = schema.meaning(keys)
        return f"`{dotted}` is missing: give it {schema.allowed(keys)}" + (f" ({meaning})." if meaning else ".")
    origin = tree.origin(written)
    where = f"{origin}" if origin else "by default"
    if error["type"] == "extra_forbidden":
        section = ".".join(written[:-1])
        known = schema.children(keys[:-1])
        return (
            f"Unknown key `{dotted}` ({where}).{_guess(keys, schema, error['input'])}"
            f" {f'`{section}`' if section else schema.noun} has: {', '.join(known)}."
        )
    if error["type"] == "value_error":
        return f"`{dotted}` ({where}): {error['ctx']['error']}."
    while keys and schema.node(keys) is None:
        keys = keys[:-1]  # an item of a list: the list's own key says what is allowed
    given = error["input"]
    meaning = f" ({schema.meaning(keys)})" if schema.meaning(keys) else ""
    plain = error["type"] == "string_type" and isinstance(given, bool | int | float)
    quote = f" Quotes make it text: '{json.dumps(given)}'." if plain else _unquoted(given, error["type"])
    all_of_defaults = isinstance(given, bool) and schema.children(keys) and not _either(schema.node(keys) or {})
    section = " Write {} for a section of defaults." if all_of_defaults else ""
    choices = schema.choices(keys)
    near = difflib.get_close_matches(_SYNONYMS.get(given, given), choices, n=1) if isinstance(given, str) else ()
    guess = f" Did you mean {near[0]}?" if near and near[0] != given else ""
    return f"`{dotted}` ({where}): got {_show(given)}; allowed: {schema.allowed(keys)}{meaning}.{guess}{quote}{section}"


def _unquoted(given: Any, wanted: str) -> str:
    """How a number that came as text, or a whole one that came as 1e3, is written; empty where it is neither."""
    if not wanted.startswith(("int_", "float_")):
        return ""
    fits = _WHOLE if wanted.startswith("int_") else _NUMBER
    if isinstance(given, str) and fits.fullmatch(given):
        return f" Without quotes it is a number: {given}."
    if isinstance(given, float) and given.is_integer() and 0 <= given < sys.maxsize:
        return f" Write {int(given)}."
    return ""


def _guess(keys: Keys, schema: Schema, given: Any) -> str:
    """What was probably meant by a key that does not exist, in a sentence: an earlier name, another system's, a slip."""
    *section, name = keys
    if name == "<<":
        return (
            " YAML 1.2, which recipes are read as, merges nothing by it: write the keys out, or share them by a `base`."
        )
    whole = tuple(".".join(keys).split("."))
    if whole != keys:
        nested = f"{': {'.join(whole)}: ...{'}' * (len(whole) - 1)}"
        known = f" Dots are for the command line; in a file write `{nested}`."
        return known if schema.node(whole) is not None else _guess(whole, schema, given)
    now = RENAMED.get(name)
    if now in schema.children(tuple(section)):
        return f" It is called `{'.'.join((*section, now))}` now."
    theirs = [] if any(leaf[-1] == name for leaf in schema.leaves()) else _ours(keys, schema)
    if theirs:
        return f" {_told(theirs)}"
    inside = (
        [(below, _ours(below, schema)) for below in _leaves(given, keys)]
        if isinstance(given, dict) and not section
        else []
    )
    named = [f"`{'.'.join(below)}` is {' and '.join(each.words for each in ours)}" for below, ours in inside if ours]
    if named:
        return f" It is another system's section. Here {', '.join(named[:MOST_NAMED])}; for more see docs/glossary.md."
    guess = nearest(keys, schema)
    return f" Did you mean `{guess}`?" if guess else ""


def _told(theirs: list[Meant]) -> str:
    """Their name in ours: one name of several peers may be several keys."""
    by_peers: dict[str, list[Meant]] = {}
    for each in theirs:
        by_peers.setdefault(each.peers, []).append(each)
    told = []
    for peers, keys in by_peers.items():
        have = "have" if " and " in peers else "has"
        notes = "; ".join(each.note for each in keys if each.note)
        told.append(
            f"What {peers} {have} by that name is {' and '.join(f'`{each.key}`' for each in keys)} here"
            + (f" ({notes})." if notes else ".")
        )
    return " ".join(told)


def _ours(keys: Keys, schema: Schema) -> list[Meant]:
    """The keys of this recipe that a peer's stands for, of the role that it was written under."""
    # What the table says of the actor holds for every role that has the same keys.
    found = []
    for each in meant_by(keys[-1], (*(["actor"] if schema.node((keys[0], "parallel")) else []), *keys[:-1])):
        role = (keys[0], *each.key.split(".")[1:])
        of_role = each.key.startswith("actor.") and schema.node(role) is not None
        found.append(replace(each, key=".".join(role)) if of_role else each)
    return [each for each in found if schema.knows(tuple(each.key.split(".")))]


def _leaves(value: Any, keys: Keys) -> Iterator[Keys]:
    """The paths of all values of a section that was given."""
    if not isinstance(value, dict):
        yield keys
        return
    for key, below in value.items():
        yield from _leaves(below, (*keys, str(key)))


def _show(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    text = json.dumps(value, default=str)
    if len(text) > 60:
        text = text[:57] + "..."
    return f"{text} ({_GIVEN.get(type(value), type(value).__name__)})"
