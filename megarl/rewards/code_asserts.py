"""Asserts that are decided outside of the sandbox: of each, the one call of the graded code runs inside, and all else here.

What an assert compares with would tell code that sets out to pass what to say. A row is anybody's as well, so nothing of it is
handed to Python's own `eval`: there are numbers, texts, comparisons and a few functions, and no attribute but `math`'s.
"""

from __future__ import annotations

import ast
import copy
import math
import operator
from collections.abc import Callable
from typing import Any

VALUE = "_value"  # stands where the call was
MOST_BITS = 20_000  # of a product, or a power
MOST_LENGTH = 65_536  # of a text or a list that is repeated
MOST_DIGITS = 1000  # that a number is rounded to


class Beyond(ValueError):
    """What is not computed here."""


def _rounded(value: Any, digits: Any = None) -> Any:
    """Python's round, to a power of ten that is no wait to compute."""
    if digits is not None and abs(digits) > MOST_DIGITS:
        raise Beyond
    return round(value, digits)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (abs, all, any, bool, dict, float, int, len, list, max, min, set, sorted, str, sum, tuple)
} | {
    "round": _rounded,
    "math.isclose": math.isclose,
    "math.fabs": math.fabs,
    "isclose": math.isclose,
    "frozenset": frozenset,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
    ast.Is: lambda left, right: type(left) is type(right) and left == right,
}
OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
}
_KINDS: dict[type[ast.expr], Callable[[Any], Any]] = {ast.Tuple: tuple, ast.List: list, ast.Set: set}
_SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def split(test: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """What of an assert runs inside, and the rest with VALUE in its place; None where that is not one part, or all of it."""
    inside: list[ast.expr] = []
    rest = _Parts(inside).visit(copy.deepcopy(test))
    decides = not isinstance(rest, ast.Name | ast.UnaryOp)  # whoever is to say no more than yes may guess it
    return (inside[0], rest) if len(inside) == 1 and decides and _known(rest) else None


def holds(test: ast.expr, value: Any) -> bool:
    """Whether the rest of an assert is true of a value. False where it cannot be computed."""
    try:
        return bool(_computed(test, value))
    except Exception:  # values are the code's: anything may be added to anything
        return False


class _Parts(ast.NodeTransformer):
    """Puts VALUE where the code's own calls are, and keeps these."""

    def __init__(self, inside: list[ast.expr]) -> None:
        self._inside = inside

    def visit(self, node: ast.AST) -> Any:
        outside = (
            ast.Constant
            | ast.Tuple
            | ast.List
            | ast.Set
            | ast.Dict
            | ast.Compare
            | ast.BoolOp
            | ast.UnaryOp
            | ast.BinOp
        )
        if not isinstance(node, ast.expr):
            return node
        if isinstance(node, outside) or (isinstance(node, ast.Call) and _name(node.func) in FUNCTIONS):
            return self._call(node) if isinstance(node, ast.Call) else self.generic_visit(node)
        self._inside.append(node)
        return ast.Name(VALUE)

    def _call(self, node: ast.Call) -> ast.expr:
        """One of FUNCTIONS: inside as well where it is of the code's value alone, of which `list` may be what can be sent."""
        whole = copy.deepcopy(node)
        node.args = [self.visit(each) for each in node.args]
        for keyword in node.keywords:
            keyword.value = self.visit(keyword.value)
        if not _name(node.func).endswith("isclose") and node.args and isinstance(node.args[0], ast.Name):
            self._inside[-1:] = [whole]
            return ast.Name(VALUE)
        return node


def _known(rest: ast.expr) -> bool:
    """Whether all of it can be computed here."""
    signs = {*COMPARISONS, *OPERATIONS, *_SIGNS, ast.And, ast.Or, ast.Load}
    for node in ast.walk(rest):
        if isinstance(node, ast.cmpop | ast.operator | ast.unaryop | ast.boolop) and type(node) not in signs:
            return False
        if isinstance(node, ast.Starred) or (isinstance(node, ast.Dict) and None in node.keys):
            return False
        if isinstance(node, ast.keyword) and node.arg is None:
            return False
    return True


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def _computed(node: ast.expr, value: Any) -> Any:
    found: Any
    match node:
        case ast.Constant():
            found = node.value
        case ast.Name():
            found = value
        case ast.Tuple() | ast.List() | ast.Set():
            found = _KINDS[type(node)](_computed(each, value) for each in node.elts)
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            found = {_computed(key, value): _computed(each, value) for key, each in pairs if key is not None}
        case ast.BoolOp():
            truths = (bool(_computed(each, value)) for each in node.values)
            found = all(truths) if isinstance(node.op, ast.And) else any(truths)
        case ast.UnaryOp():
            found = _SIGNS[type(node.op)](_computed(node.operand, value))
        case ast.BinOp():
            found = _operated(node.op, _computed(node.left, value), _computed(node.right, value))
        case ast.Compare():
            found = _compared(node, value)
        case ast.Call():
            given = [_computed(each, value) for each in node.args]
            named = {each.arg: _computed(each.value, value) for each in node.keywords if each.arg is not None}
            found = FUNCTIONS[_name(node.func)](*given, **named)
        case _:
            raise Beyond(ast.dump(node))
    return found


def _compared(node: ast.Compare, value: Any) -> bool:
    sides = [_computed(each, value) for each in (node.left, *node.comparators)]
    return all(
        COMPARISONS[type(sign)](left, right) for sign, left, right in zip(node.ops, sides, sides[1:], strict=False)
    )


def _operated(sign: ast.operator, left: Any, right: Any) -> Any:
    """Nothing large comes of it: a product or a power could fill the memory, and `%` of a text as well."""
    numbers = all(isinstance(each, int | float) for each in (left, right))
    if isinstance(sign, ast.Mult) and not numbers:
        count, several = (left, right) if isinstance(left, int) else (right, left)
        if not isinstance(count, int) or count * len(several) > MOST_LENGTH:
            raise Beyond
    elif isinstance(sign, ast.Mult | ast.Pow | ast.Mod):
        bits = [each.bit_length() if isinstance(each, int) else 1 for each in (left, right)]
        most = bits[0] * max(abs(right), 1) if isinstance(sign, ast.Pow) else sum(bits)
        if not numbers or most > MOST_BITS:
            raise Beyond
    return OPERATIONS[type(sign)](left, right)
