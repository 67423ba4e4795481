"""Tests in a sandbox of their own, and the code that they call in another one: inside of the first, what stands for the second.

Given to the runner as text, which runs it with its own names. What the code gives comes as text, and is read as data of
built-in types: nothing of it runs here, and what is no data stays where it is and is asked for there.
"""

from __future__ import annotations

import ast
import builtins
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from megarl.sandbox.runner import MADE, Channel, Held, NoLiteralError, literal, made

BESIDE = 77  # exit code: the tests hand over what is no data, and can be run beside the code alone
FAR: list[Channel] = []
MIXED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift")
ORDERED = ("lt", "le", "gt", "ge")


def spelled(value: Any) -> str:
    """A value as the code's sandbox reads it."""
    try:
        return literal(value, 0, True)
    except NoLiteralError:
        os._exit(BESIDE)


def asked(function: str, *given: Any, **named: Any) -> Any:
    """What a function gives there. Raises what it raises, by the name of one of Python's own exceptions."""
    FAR[0].write(f"_call({function}, {spelled([*given])}, {spelled(named)})".encode())
    said = FAR[0].read().decode(errors="replace")
    if said[:1] != "+":
        name, _, words = said[1:].partition(": ")
        kind: Any = getattr(builtins, name, None)
        plain = isinstance(kind, type) and issubclass(kind, Exception)
        # An end of its own would end a loop of the tests, with nothing said.
        if not plain or (issubclass(kind, StopIteration | StopAsyncIteration) and function != "_do('next')"):
            kind = RuntimeError
        raise kind(words)
    what, value, after = read(ast.parse(said[1:], mode="eval").body)
    for number, now in after.items():
        changed(given[number], now)
    return StandIn(f"_held[{value:d}]") if what == "held" else value


def changed(given: Any, now: Any) -> None:
    """Make an argument what the code made of it."""
    if type(given) is not type(now):
        return
    if isinstance(given, list):
        given[:] = now
    elif isinstance(given, dict | set):
        given.clear()
        given.update(now)


def read(node: ast.expr) -> Any:
    """The value of an expression that is data. Raises ValueError where it is anything else."""
    found: Any
    match node:
        case ast.Constant():
            found = node.value
        case ast.Tuple() | ast.List():
            found = [read(each) for each in node.elts]
            found = tuple(found) if isinstance(node, ast.Tuple) else found
        case ast.Set():
            found = {fixed(read(each)) for each in node.elts}
        case ast.Dict():
            found = {fixed(read(key)): read(each) for key, each in zip(node.keys, node.values, strict=True) if key}
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() | complex() as value)):
            found = -value
        case ast.BinOp(left, ast.Add() | ast.Sub() as sign, ast.Constant(complex() as value)):
            found = read(left) + value if isinstance(sign, ast.Add) else read(left) - value
        case ast.Call(ast.Name("set"), [], []):
            found = set()
        case ast.Call(ast.Name("_made"), [ast.Constant(str() as name), *rest], []) if name in (*MADE, "builtins.float"):
            parts = (read(each.value) if isinstance(each, ast.Starred) else (read(each),) for each in rest)
            found = made(name, *(each for several in parts for each in several))
        case _:
            raise ValueError(f"it is no data: {ast.unparse(node)[:80]}")
    return found


def fixed(value: Any) -> Any:
    """As a part of a set, or a key."""
    return frozenset(value) if isinstance(value, set) else value


class StandIn(Held):
    """What is no data, or a function: what is done with it is done where it is.

    What the tests want is not handed over to be compared there: it is not equal to any data, and arithmetic with data gives
    no data.
    """

    __slots__ = ()
    __hash__ = object.__hash__

    def __init__(self, reference: str) -> None:
        object.__setattr__(self, "_reference", reference)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call it there."""
        return asked(self._reference, *given, **named)

    def __getattr__(self, name: str) -> Any:
        return asked("_do('getattr')", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        asked("_do('setattr')", self, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and bool(asked("_do('eq')", self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __iter__(self) -> Any:
        found = asked("_do('iter')", self)
        return found if isinstance(found, Held) else iter(found)

    def __bool__(self) -> bool:
        return bool(asked("_do('bool')", self))

    def __instancecheck__(self, value: Any) -> bool:
        return bool(asked("_do('isinstance')", value, self))


def far_method(name: str, function: str) -> None:
    """Have a method of StandIn done there by a function of the object and what else it is given."""
    setattr(StandIn, name, lambda self, *given: asked(f"_do({function!r})", self, *given))


def between(name: str, *, turned: bool) -> None:
    """Have an operation with two sides done there. turned: the other one is on the left."""

    def operated(self: Any, other: Any) -> Any:
        if name in ORDERED and not isinstance(other, Held):
            return NotImplemented
        found = asked(f"_do({name!r})", *((other, self) if turned else (self, other)))
        return found if isinstance(other, Held) or isinstance(found, Held) else NotImplemented

    setattr(StandIn, f"__{'r' if turned else ''}{name.rstrip('_')}__", operated)


for _name in (
    "len",
    "next",
    "str",
    "repr",
    "int",
    "float",
    "index",
    "abs",
    "neg",
    "getitem",
    "setitem",
    "delitem",
    "reversed",
):
    far_method(f"__{_name}__", _name)
for _name in (*MIXED, *ORDERED):
    between(_name, turned=False)
for _name in MIXED:
    between(_name, turned=True)


def stand_ins(names: Sequence[str], far: Channel) -> dict[str, Any]:
    """Of each name that the code has: its value, where that is data, or what stands for it."""
    FAR.append(far)
    found = {}
    for name in names:
        try:
            value = asked(f"(lambda: {name})")
        except Exception:
            continue  # the code does not have it, and who uses it is told so
        found[name] = StandIn(name) if isinstance(value, Held) else value
    return found
