"""Where a recipe's values come from: YAML files, their one base, and the command line; each value remembers its line.

`${NAME}` in a value is the environment's variable; `$${` is a plain `${`.

It knows nothing of the schema: `load.py` validates what this module reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megarl.core.errors import UserError
from megarl.core.shipped import shipped_recipe
from megarl.core.words import nearest_beside

Keys = tuple[str, ...]
BASE_KEY = "base"
MISSING = object()  # where nothing stands, not even null
COMMAND_LINE = "on the command line"
# Deeper than any recipe: only an alias that holds itself gets there.
DEEPEST = 20
MOST_KEYS = 100_000  # and only aliases of aliases make more of them
_FLOAT = re.compile(
    r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:e[-+]?[0-9]+)?|[0-9]+e[-+]?[0-9]+|\.inf)$|\.nan$", re.IGNORECASE
)
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$")
_BOOL = re.compile(r"true$|false$", re.IGNORECASE)
# While YAML is read, characters that nobody uses stand for those of `$${` and of `${NAME}`: within { } a brace would end a value.
_WRITTEN = re.compile(r"(\$\$\{)([^{}\n]*\})?|\$\{([^{}\s\"',\]]*)(\})?")
_ESCAPED, _OPEN, _CLOSE, _UNCLOSED = "\U0010fff0", "\U0010fff1", "\U0010fff2", "\U0010fff3"
_VARIABLE = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")


class _Loader(yaml.SafeLoader):
    """YAML 1.2's reading of plain words: `1e-5` is a number, `on` is a string, `2026-01-01` is a string."""


# Of YAML 1.1's words only `null` stays; numbers and true/false are told below.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag == "tag:yaml.org,2002:null"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Quotes every string that either reading of plain words would take for something else; `${` is written as `$${`."""

    def represent_text(self, text: str) -> yaml.Node:
        """A string that reads back as it is."""
        return self.represent_str(text.replace("${", "$${"))


_Dumper.add_representer(str, _Dumper.represent_text)


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    _class.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))


@dataclass(frozen=True)
class Origin:
    """Where a value was given; `file` is None on the command line."""

    file: Path | None = None
    line: int = 0

    def __str__(self) -> str:
        return COMMAND_LINE if self.file is None else f"{self.file}:{self.line}"


@dataclass
class Tree:
    """Nested values, and the origin of every key (sections too), by its path.

    vain: of each null that was put over nothing, by its path, where it was given.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Keys, Origin] = field(default_factory=dict)
    vain: dict[Keys, Origin] = field(default_factory=dict)

    def merge(self, other: Tree) -> None:
        """Put the other's values over these: sections are merged, everything else is replaced."""
        for keys, origin in other.origins.items():
            if _get(other.values, keys) is None and _get(self.values, keys, MISSING) is MISSING:
                self.vain[keys] = origin
        _merge(self.values, other.values)
        for keys, origin in other.origins.items():
            if not isinstance(_get(self.values, keys), dict):
                self.origins = {old: at for old, at in self.origins.items() if old[: len(keys)] != keys}
            self.origins[keys] = origin

    def origin(self, keys: Keys) -> Origin | None:
        """Where the value, or else the nearest section around it, was given."""
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.origins:
                return self.origins[keys[:length]]
        return None

    def given(self) -> Iterator[Keys]:
        """Paths of the values that were given, without the sections around them; an empty section is a value."""
        return (keys for keys in self.origins if not isinstance(value := _get(self.values, keys), dict) or not value)


def read_tree(file: Path) -> Tree:
    """Read a recipe and its base. Raises UserError: missing, not YAML, a key twice, a base that has a base."""
    tree = _read_file(file, "recipe")
    if BASE_KEY not in tree.values:
        return tree
    base = tree.values.pop(BASE_KEY)
    origin = tree.origins.pop((BASE_KEY,))
    if not isinstance(base, str):
        raise UserError(f"{origin}: `base` must be the path of one recipe, relative to this file; got {base!r}.")
    result = _read_file(file.parent / base, f"base of {file} (named at {origin})", f"relative to {file.parent}")
    if BASE_KEY in result.values:
        raise UserError(
            f"{result.origins[(BASE_KEY,)]}: a base may not have a base of its own, and "
            f"{file.parent / base} is the base of {file}. Copy the keys that you need into one of the two."
        )
    result.merge(tree)
    return result


def base_of(file: Path) -> Path | None:
    """The recipe that a file builds on; None where it stands alone. Raises UserError, as `read_tree` does."""
    base = _read_file(file, "recipe").values.get(BASE_KEY)
    return file.parent / base if isinstance(base, str) else None


def read_override(text: str) -> Tree:
    """Read one `key.path=value` of the command line; the value is YAML. Raises UserError when it is not that."""
    path, equals, value = text.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or not all(keys):
        raise UserError(
            f"Cannot read the override {text!r} on the command line. Write key.path=value without spaces around `=`, "
            "for example train.steps=10 or 'rollout.stop=[END]'."
        )
    try:
        loader = _Loader(_marked(value))
        node = loader.get_single_node()
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(
            f"Cannot read the value of {path!r} on the command line: {value!r} is not YAML ({_problem(error)})."
        ) from None
    tree = Tree()
    for length in range(1, len(keys) + 1):
        tree.origins[keys[:length]] = Origin()
    parsed = None if node is None else _convert(loader, node, None, keys, tree)
    section = tree.values
    for key in keys[:-1]:
        section = section.setdefault(key, {})
    section[keys[-1]] = parsed
    return tree


def dump_yaml(values: dict[str, Any]) -> str:
    """YAML that reads back as the same values, here and, but for `${`, in other YAML readers."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True)
    return text


def _read_file(file: Path, what: str, relative: str = "relative to the folder that megarl is called in") -> Tree:
    try:
        is_folder = file.is_dir()
    except OSError as error:
        raise UserError(f"Cannot read {what} {str(file)[:200]}: {error.strerror}.") from None
    if is_folder:
        raise UserError(f"{file}, the {what}, is {_kind_of_folder(file)}.")
    if file.exists() and not file.is_file():
        raise UserError(
            f"{file}, the {what}, is a pipe or a device, which is read once. Write it into a file, and name that."
        )
    if not file.is_file():
        near = nearest_beside(file)
        hint = f" Did you mean {near}?" if near else ""
        brought = (
            f" megarl brings one of that name: megarl recipe copy {file.stem}." if shipped_recipe(file.name) else ""
        )
        raise UserError(f"There is no {what} at {file}.{hint} This path is {relative}.{brought}")
    try:
        loader = _Loader(_marked(file.read_text(encoding="utf-8")))
        node = loader.get_single_node()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not a text file in UTF-8 ({error.reason} at byte {error.start}).") from None
    except OSError as error:
        raise UserError(f"Cannot read {file}: {error.strerror}.") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark else str(file)
        raise UserError(
            f"{where}: this is not YAML: {_problem(error)}. Check indentation, colons and quotes."
        ) from None
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{file} must hold sections with keys, such as `train:` and below it `steps: 10`; it does not.")
    tree = Tree()
    tree.values = _convert(loader, node, file, (), tree)
    return tree


def _kind_of_folder(folder: Path) -> str:
    """What a folder in a recipe's place is, and what to name: that of a model or of a run, or any other."""
    if (folder / "config.json").is_file():
        return f"a model's folder. Name a recipe in its place, and the model behind it: model.path={folder}"
    trained = folder / "hf"
    behind = (
        f"; behind it model.path={trained} is what the run has trained" if (trained / "config.json").is_file() else ""
    )
    return f"a folder. Name a file in it, such as {folder / 'recipe.yaml'}{behind}"


def _problem(error: Exception) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split())


def _convert(loader: _Loader, node: yaml.Node, file: Path | None, keys: Keys, tree: Tree) -> Any:
    """The node's value; notes the origin of every key below it. Raises UserError for a key that stands twice."""
    if not isinstance(node, yaml.MappingNode):
        _expand(loader, node, file, keys)
        try:
            return loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:  # a number of thousands of digits
            origin = Origin(file, node.start_mark.line + 1)
            raise UserError(f"Cannot read the value of {'.'.join(keys)} ({origin}): {_problem(error)}.") from None
    values: dict[str, Any] = {}
    if len(keys) > DEEPEST or len(tree.origins) > MOST_KEYS:
        raise UserError(f"{Origin(file, node.start_mark.line + 1)}: `{'.'.join(keys[:3])}...` is nested without end.")
    for key_node, value_node in node.value:
        origin = Origin(file, key_node.start_mark.line + 1)
        if not isinstance(key_node, yaml.ScalarNode):
            raise UserError(f"{origin}: a key must be a plain word; below {'.'.join(keys) or 'the top'} one is not.")
        # Keys have no variables.
        name = key_node.value.replace(_ESCAPED, "${").replace(_OPEN, "${").replace(_CLOSE, "}")
        below = (*keys, name)
        if name in values:
            first = tree.origins[below] if file else "the same place"
            raise UserError(f"{origin}: `{'.'.join(below)}` stands twice; the first is at {first}. Remove one of them.")
        tree.origins[below] = origin
        values[name] = _convert(loader, value_node, file, below, tree)
    return values


def _expand(loader: _Loader, node: yaml.Node, file: Path | None, keys: Keys, seen: set[int] | None = None) -> None:
    """Put the environment's variables into a node's texts: what stands there without quotes may become a number."""
    seen = set() if seen is None else seen
    if id(node) in seen:  # an alias that holds itself
        return
    seen.add(id(node))
    if isinstance(node, yaml.CollectionNode):
        below = node.value if isinstance(node, yaml.SequenceNode) else [value for _, value in node.value]
        for each in below:
            _expand(loader, each, file, keys, seen)
    elif isinstance(node, yaml.ScalarNode):
        _expand_text(loader, node, Origin(file, node.start_mark.line + 1), keys)


def _expand_text(loader: _Loader, node: yaml.ScalarNode, origin: Origin, keys: Keys) -> None:
    where = f"`{'.'.join(keys)}` ({origin})"
    if {_ESCAPED, _OPEN}.intersection(node.value):
        text = _VARIABLE.sub(lambda found: _variable(found[1], where), node.value)
        node.value = text.replace(_ESCAPED, "${").replace(_CLOSE, "}")
        if node.style is None:
            node.tag = loader.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
    # "\ud800" and "\0" of a quoted text: no file has such a name, and no file can hold the first.
    if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in node.value):
        raise UserError(f"{where}: {node.value!r} has a NUL, or half of a character. Leave it out.")


def _variable(name: str, where: str) -> str:
    """The environment's variable. Raises UserError where there is none of that name."""
    if name.endswith(_UNCLOSED):
        plain = name.removesuffix(_UNCLOSED)
        raise UserError(f"{where}: '${{{plain}' has no closing brace. Write ${{NAME}}, or $${{ for a plain ${{.")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UserError(
            f"{where}: '${{{name}}}' names no environment variable. Write ${{NAME}}, or $${{ for a plain ${{."
        )
    if name not in os.environ:
        raise UserError(
            f"{where}: the environment variable {name} is not set. Set it (export {name}=...), or write $${{{name}}} for "
            f"a plain ${{{name}}}."
        )
    return os.environ[name]


def _marked(text: str) -> str:
    """YAML with each `${NAME}` as one plain word."""

    def mark(found: re.Match[str]) -> str:
        if not found[1]:
            return f"{_OPEN}{found[3]}{'' if found[4] else _UNCLOSED}{_CLOSE}"
        return _ESCAPED + (found[2] or "").replace("}", _CLOSE)

    return _WRITTEN.sub(mark, text)


def _merge(under: dict[str, Any], over: dict[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(under.get(key), dict):
            _merge(under[key], value)
        else:
            under[key] = value


def _get(values: Any, keys: Keys, default: object = None) -> Any:
    for key in keys:
        if not isinstance(values, dict) or key not in values:
            return default
        values = values[key]
    return values
