"""Which of a row's statements can run in a sandbox of their own, apart from the code that they test, and with what. Pure.

Beside the code a test can be lied to: by an object that is equal to everything, or by code that reads what is wanted. Apart
from it, the test's own loops, names and helpers are its own, and only calls of the code go across (megarl/sandbox/stand_ins.py).
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from collections.abc import Iterable, Iterator
from functools import lru_cache

from megarl.sandbox.job import Check

BUILTINS = frozenset(dir(builtins))
# What a test may import: modules that compute, and do nothing to the process that the code would have to see.
MODULES = frozenset(
    (
        "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json",
        "math", "operator", "random", "re", "statistics", "string", "time", "typing",
    )
)  # fmt: skip
# Functions that act on the process or the names of the code.
BESIDE = frozenset(
    (
        "open",
        "input",
        "globals",
        "locals",
        "vars",
        "eval",
        "exec",
        "compile",
        "__import__",
        "breakpoint",
        "exit",
        "quit",
    )
)
# Of one of these a yes is enough, whatever the code gives.
YES = frozenset(("all", "any", "bool", "callable", "hasattr", "isinstance", "issubclass"))
DECIDES = (
    ast.Compare,
    ast.BoolOp,
    ast.IfExp,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.Not,
)
PREPARES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
BLOCK = re.compile(r"^```[^\n`]*\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


def apart(source: str, setup: str, prompt: str, entry: str | None) -> Check:
    """The check that runs statements apart from the code; beside it where they do what cannot be done from elsewhere.

    setup: what runs before them. prompt: of HumanEval's form its helpers, other than the function `entry`, are the tests' own.
    """
    whole = f"{setup}\n{source}" if setup else source
    if entry is not None:
        whole = "\n".join([*_helpers(prompt, whole, entry), whole])
    try:
        tree, names = ast.parse(whole), free_names(whole)
    except (SyntaxError, ValueError, RecursionError):
        return Check("assert", source)
    if not names or not all(_crosses(node, names) for node in ast.walk(tree)):
        return Check("assert", source)
    return Check("apart", whole, tuple(sorted(names)))


def free_names(source: str) -> set[str]:
    """Names that a text uses and does not bind, but for Python's own. Raises SyntaxError."""
    top = symtable.symtable(source, "<tests>", "exec")
    bound = {each.get_name() for each in top.get_symbols() if each.is_assigned() or each.is_imported()}
    used = {each.get_name() for each in top.get_symbols() if each.is_referenced()}
    for table in _inner(top):
        used |= {each.get_name() for each in table.get_symbols() if each.is_global() and each.is_referenced()}
    return used - bound - BUILTINS


def bound_names(source: str) -> frozenset[str]:
    """Names that a text binds for what comes after it; none of a text that is no Python."""
    try:
        symbols = symtable.symtable(source, "<tests>", "exec").get_symbols()
    except SyntaxError:
        return frozenset()
    return frozenset(each.get_name() for each in symbols if each.is_assigned() or each.is_imported())


def asks(node: ast.AST, ours: Iterable[str]) -> bool:
    """Whether what an expression gives says nothing of what a test wants: it calls the code, and compares nothing.

    ours: names of the tests' own, whose calls are looked into. What an argument of the code's is made by, is its own matter.
    """
    if isinstance(node, ast.Call):
        name = root(node.func)
        if isinstance(node.func, ast.Name) and name in YES:
            return False
        if name not in BUILTINS and name not in ours:
            return asks(node.func, ours)
    return not isinstance(node, DECIDES) and all(asks(each, ours) for each in ast.iter_child_nodes(node))


def root(node: ast.expr) -> str:
    """The name that an expression begins with, `a` of `a.b(c).d`; empty where it begins with something else."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def prepares(body: list[ast.stmt]) -> bool:
    """Whether statements only make ready what tests use: nothing of them can fail to hold."""
    return bool(body) and all(isinstance(each, PREPARES) or _says_nothing(each) for each in body)


def inside(setup: str, sources: Iterable[str]) -> str:
    """What of a setup the code's own sandbox needs: where checks there use no name of it, its imports alone.

    The rest may hold what the tests want, or a function that knows it.
    """
    used = {node.id for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    try:
        if used & bound_names(setup):
            return setup
        return "\n".join(ast.unparse(each) for each in ast.parse(setup).body if isinstance(each, PREPARES[:2]))
    except SyntaxError:
        return setup


def _says_nothing(statement: ast.stmt) -> bool:
    """A text that explains, `pass`, or a call of a method such as `x.append(1)`."""
    if isinstance(statement, ast.Expr):
        said = statement.value
        return isinstance(said, ast.Constant | ast.Name) or (
            isinstance(said, ast.Call) and isinstance(said.func, ast.Attribute)
        )
    return isinstance(statement, ast.Pass)


def _crosses(node: ast.AST, names: set[str]) -> bool:
    """Whether a part of the tests does the same apart from the code. names: the code's."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
        return all(module.partition(".")[0] in MODULES for module in modules)
    if isinstance(node, ast.Name):
        return node.id not in BESIDE
    if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
        return False
    if isinstance(node, ast.Compare):  # what is the same object is not, once it has come across
        sides = zip(node.ops, [node.left, *node.comparators[:-1]], node.comparators, strict=True)
        return not any(
            isinstance(sign, ast.Is | ast.IsNot) and not any(isinstance(each, ast.Constant) for each in pair)
            for sign, *pair in sides
        )
    ahead: list[ast.expr | None] = []  # classes of the code's own, which stay where they are
    if isinstance(node, ast.ExceptHandler):
        ahead = [node.type]
    elif isinstance(node, ast.ClassDef):
        ahead = [*node.bases, *node.decorator_list]
    elif isinstance(node, ast.FunctionDef):
        ahead = [*node.decorator_list]
    return not any(
        isinstance(each, ast.Name) and each.id in names
        for above in ahead
        if above is not None
        for each in ast.walk(above)
    )


def _helpers(prompt: str, source: str, entry: str) -> list[str]:
    """Functions whole in the prompt that the tests use, and what these use: the code may have others of their names."""
    found = _defined(prompt)
    found.pop(entry, None)
    chosen: dict[str, str] = {}
    try:
        wanted = free_names(source)
        while new := [name for name in found if name in wanted and name not in chosen]:
            chosen |= {name: found[name] for name in new}
            wanted |= {name for each in new for name in free_names(found[each])}
    except SyntaxError:
        return []
    return [text for name, text in found.items() if name in chosen or not name] if chosen else []


@lru_cache(maxsize=64)
def _defined(prompt: str) -> dict[str, str]:
    """Functions of a prompt's code by name, those with a body; its imports stand under no name."""
    for text in (prompt, *reversed(BLOCK.findall(prompt))):
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        imports = [ast.unparse(each) for each in body if isinstance(each, ast.Import | ast.ImportFrom)]
        whole = {each.name: ast.unparse(each) for each in body if isinstance(each, ast.FunctionDef) and _has_body(each)}
        return {**({"": "\n".join(imports)} if imports else {}), **whole}
    return {}


def _has_body(function: ast.FunctionDef) -> bool:
    return not all(_says_nothing(each) or isinstance(each, ast.Raise) for each in function.body)


def _inner(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _inner(child)
