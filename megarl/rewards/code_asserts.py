"""Asserts that are decided outside of the sandbox: of each, the one call of the graded code runs inside, and all else here.

What an assert compares with would tell code that sets out to pass what to say. A row is anybody's as well, so nothing of it is
handed to Python's own `eval`: there are numbers, texts, comparisons and a few functions, and no attribute but `math`'s.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

VALUE = "_value"  # stands where the call was
MOST_DIGITS = 10**18  # of numbers that are multiplied or raised
MOST_POWER = 64
FUNCTIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (abs, all, any, bool, dict, float, int, len, list, max, min, round, set, sorted, str, sum, tuple)
} | {"math.isclose": math.isclose, "math.fabs": math.fabs, "isclose": math.isclose, "frozenset": frozenset}
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
    ast.IsNot: lambda left, right: type(left) is not type(right) or left != right,
}
OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
}
_KINDS: dict[type[ast.expr], Callable[[Any], Any]] = {ast.Tuple: tuple, ast.List: list, ast.Set: set}
_SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class Beyond(ValueError):
    """What is not computed here."""


def apart(test: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """What of an assert runs inside, and the rest with VALUE in its place; None where that is not one part, or all of it."""
    inside: list[ast.expr] = []
    rest = _Parts(inside).visit(test)
    decides = not isinstance(rest, ast.Name | ast.UnaryOp)  # whoever is to say no more than yes may guess it
    return (inside[0], rest) if len(inside) == 1 and decides else None


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
            if isinstance(node, ast.Call):
                node.args = [self.visit(each) for each in node.args]
                for keyword in node.keywords:
                    keyword.value = self.visit(keyword.value)
                return node
            return self.generic_visit(node)
        self._inside.append(node)
        return ast.Name(VALUE)


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
    """A product is of numbers that are not large: of texts it would fill the memory."""
    if isinstance(sign, ast.Mult | ast.Pow):
        if not all(isinstance(each, int | float) and abs(each) <= MOST_DIGITS for each in (left, right)):
            raise Beyond
        if isinstance(sign, ast.Pow) and abs(right) > MOST_POWER:
            raise Beyond
    return OPERATIONS[type(sign)](left, right)
