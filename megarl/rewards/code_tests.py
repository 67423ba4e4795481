"""A row's tests for code, out of the forms that data sets have them in, and what each wants to see. Pure; running is code.py's.

Pairs of standard input and output: APPS, TACO, CodeContests, DeepCoder, LiveCodeBench. Asserts: MBPP, HumanEval, AceCode. Calls
with arguments: APPS and LiveCodeBench.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import re
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.data.answers import Answer
from megarl.rewards.code_apart import BUILTINS, apart, asks, bound_names, inside, prepares, root
from megarl.rewards.code_asserts import holds, split
from megarl.sandbox.job import MOST_VALUE, Check, Checked

# Fields that data sets keep their tests in, in the order in which they are looked for; then the row's answer. Public tests are
# last: they are often in the prompt, where a program can have read them.
FIELDS = (
    "tests",
    "test_cases",
    "input_output",
    "test_list",
    "test",
    "private_tests",
    "generated_tests",
    "private_test_cases",
    "public_tests",
    "public_test_cases",
)
SETUP_FIELDS = ("test_setup_code", "test_imports")
OPENS = re.compile(r"^[ \t]*```[^\n`]*\n", flags=re.MULTILINE)
CLOSES = re.compile(r"^[ \t]*```[ \t]*\r?$", flags=re.MULTILINE)
SHOWN = 80  # characters of what is no test, in messages
# What ast.literal_eval raises of texts that anybody may have written: `0x` and hundreds of digits in front of `+1j` overflows.
NO_LITERAL = (ValueError, TypeError, SyntaxError, ArithmeticError, RecursionError, MemoryError)


@dataclass(frozen=True)
class Pair:
    """What the program reads, and what it should write."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class Expected:
    """A line that is run after the code. For a value: what it should be.

    exactly: of the same type too, as `is` asks. as_json: lists and tuples are alike, and a list of one stands for its item.
    rest: of an assert that does more than compare with one value, what is left of it without the code's call.
    """

    check: Check
    value: Any = None
    exactly: bool = False
    as_json: bool = False
    rest: ast.expr | None = None

    def met(self, said: Checked) -> bool:
        """Whether the check passed. What a value is, is judged here, where the code cannot reach."""
        if not said.ok or self.check.kind != "value":
            return said.ok
        if len(said.text) > MOST_VALUE:
            return False  # that was not the runner
        try:
            with warnings.catch_warnings(action="ignore"):  # `1if 1else 1if ...` would fill a log
                value = ast.literal_eval(said.text)
        except NO_LITERAL:
            return False  # a set of sets as well, which has no literal
        if self.rest is not None:
            return holds(self.rest, value)
        if self.as_json:
            wanted = _lists(self.value)
            return _lists(value) == wanted or (isinstance(wanted, list) and [_lists(value)] == wanted)
        return bool(value == self.value) and (not self.exactly or type(value) is type(self.value))


@dataclass(frozen=True)
class RowTests:
    """A row's tests. setup: what the row has run after the code, before the checks. prepared: what stands beside the checks, and
    is no test itself.
    """

    pairs: tuple[Pair, ...] = ()
    checks: tuple[Expected, ...] = ()
    setup: str = ""
    prepared: str = ""

    def setup_inside(self) -> str:
        """What runs between the code and checks in its sandbox: the setup, which it may count on, and what else checks need."""
        needed = inside(self.prepared, [each.check.source for each in self.checks if each.check.kind != "apart"])
        return _joined([self.setup, needed])

    def first(self, count: int) -> RowTests:
        """The first so many."""
        return replace(self, pairs=self.pairs[:count], checks=self.checks[: max(0, count - len(self.pairs))])

    def __len__(self) -> int:
        return len(self.pairs) + len(self.checks)


def last_block(response: str) -> str | None:
    """The last fenced block of code of a response; None where it has none that is closed."""
    last, at = None, 0
    # One after the other: a pattern of both would look through the rest for each block that is opened and never closed.
    while (opened := OPENS.search(response, at)) and (closed := CLOSES.search(response, opened.end())):
        last, at = response[opened.end() : closed.start()], closed.end()
    return last


def same_output(written: str, wanted: str) -> bool:
    """Whether they are the same lines, white space at the ends of lines and of the text left out."""
    return stripped(written) == stripped(wanted)


def stripped(text: str) -> str:
    """Without white space at the ends of its lines, and at its end."""
    return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))


def read_tests(metadata: Mapping[str, Any], answer: Answer, field: str | None) -> RowTests:
    """The tests of a row. field: where they are, with dots into objects; None: the first of `FIELDS` that holds some.

    Raises ValueError that says what is wrong with the row.
    """
    try:
        return _read_tests(metadata, answer, field)
    except ValueError:
        raise
    except Exception as error:  # rows hold anything: a number for a name, or brackets within thousands of brackets
        raise ValueError(f"its tests cannot be read: {type(error).__name__}: {error}") from error


def _read_tests(metadata: Mapping[str, Any], answer: Answer, field: str | None) -> RowTests:
    found = _found(metadata, answer, field)
    for name, value in found:
        tests = _of(_decoded(name, value, metadata), metadata)
        if len(tests):
            if not tests.checks and not any(stripped(pair.stdout) for pair in tests.pairs):
                raise ValueError(
                    f"its field {name!r} wants no output of any input, and a program that does nothing would pass"
                )
            setup = _setup(metadata)
            whole = _joined([setup, tests.prepared])
            if tests.prepared:  # asserts that use what it defines are read knowing it
                own = {**metadata, **dict.fromkeys(SETUP_FIELDS, ""), SETUP_FIELDS[0]: whole}
                tests = _of(_decoded(name, value, own), own)
            checks = tuple(_apart(each, whole, metadata) for each in tests.checks)
            return replace(tests, checks=checks, setup=setup)
        if tests.prepared:
            raise ValueError(
                f"its field {name!r} calls nothing, and every program would pass: {_shown(tests.prepared)}. A function "
                "`check` is called with what the row's entry_point names, others by the text itself"
            )
    names = ", ".join(repr(name) for name, _ in found)
    raise ValueError(f"its fields {names} hold no tests" if len(found) > 1 else f"its field {names} holds no tests")


def _apart(expected: Expected, setup: str, metadata: Mapping[str, Any]) -> Expected:
    """Statements run apart from the code where they can."""
    if expected.check.kind != "assert":
        return expected
    messages = metadata.get("prompt_messages")
    said = messages[-1]["content"] if isinstance(messages, list) and messages else metadata.get("prompt")
    entry = metadata.get("entry_point")
    prompt = said if isinstance(said, str) else ""
    return replace(expected, check=apart(expected.check.source, setup, prompt, str(entry) if entry else None))


def _found(metadata: Mapping[str, Any], answer: Answer, field: str | None) -> list[tuple[str, Any]]:
    """Where tests may be, with what is there; at least one."""
    if field is None:
        found = [(name, metadata[name]) for name in FIELDS if metadata.get(name)]
        if not found and not answer:
            raise ValueError(f"the row has no tests: none of the fields {', '.join(FIELDS)}, and no answer")
        return found or [("answer", answer)]
    if field == "answer":
        return [(field, answer)]
    value: Any = metadata
    for part in field.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        raise ValueError(f"the row has no field {field!r}; it has {', '.join(metadata)}")
    return [(field, value)]


def _decoded(name: str, value: Any, metadata: Mapping[str, Any]) -> Any:
    """Text as what it stands for. Raises ValueError for a pickle: to open one is to run what it holds."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        compressed = _is_compressed(value)
    if compressed:
        raise ValueError(
            f"its field {name!r} is compressed, a pickle as LiveCodeBench has it, which is never opened: a pickle may run "
            "anything. Write the tests as JSON into the rows, or name another field"
        )
    return _code(value, metadata)  # no JSON: statements


def _is_compressed(text: str) -> bool:
    """Whether it is base64 of what zlib made. Its beginning is enough: a header, and data that go with it."""
    try:
        zlib.decompressobj().decompress(base64.b64decode(text[:64], validate=True), 1)
    except (ValueError, zlib.error):
        return False
    return True


def _setup(metadata: Mapping[str, Any]) -> str:
    parts = [metadata.get(name) or "" for name in SETUP_FIELDS]
    return "\n".join(part if isinstance(part, str) else "\n".join(map(str, part)) for part in parts).strip()


def _of(value: Any, metadata: Mapping[str, Any]) -> RowTests:
    """Tests of one of the forms, decoded."""
    if isinstance(value, RowTests):
        return value
    if isinstance(value, str):
        return _code(value, metadata)
    if isinstance(value, Mapping):
        return _cases(value, metadata)
    if isinstance(value, Sequence):
        parts = [_of(each, metadata) for each in value]
        return RowTests(
            tuple(pair for part in parts for pair in part.pairs),
            tuple(check for part in parts for check in part.checks),
            prepared=_joined([part.prepared for part in parts]),
        )
    raise ValueError(f"these are no tests: {_shown(value)}")


def _cases(value: Mapping[str, Any], metadata: Mapping[str, Any]) -> RowTests:
    """Inputs and outputs of one object: of a function where it, or its row, names one."""
    inputs, outputs = (value.get(plural, value.get(plural[:-1])) for plural in ("inputs", "outputs"))
    own = value.get("fn_name") or value.get("func_name")
    # With a function's name one `input` is the arguments of one call; CodeContests has many inputs under this name.
    if isinstance(inputs, str) or (own and "inputs" not in value and "input" in value):
        inputs, outputs = [inputs], [outputs]
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise ValueError(f"these are no tests: {_shown(value)}; wanted are as many inputs as outputs")
    kind = value.get("testtype")  # LiveCodeBench's
    name = None if kind == "stdin" else own or _function_of(metadata)
    if kind == "functional" and not name:
        raise ValueError(
            f"these are tests of a function that the row does not name (fn_name, func_name): {_shown(value)}"
        )
    cases = zip(inputs, outputs, strict=True)
    if name:
        return RowTests(checks=tuple(_call(name, given, wanted) for given, wanted in cases))
    return RowTests(pairs=tuple(Pair(_text(given), _text(wanted)) for given, wanted in cases))


def _function_of(metadata: Mapping[str, Any]) -> str | None:
    nested = metadata.get("metadata")
    if isinstance(nested, str):
        try:
            nested = json.loads(nested)
        except ValueError:
            nested = None
    for each in (metadata, nested):
        if isinstance(each, Mapping) and (name := each.get("fn_name") or each.get("func_name")):
            return str(name)
    return None


def _call(name: str, given: Any, wanted: Any) -> Expected:
    """A call of the code's function, or of the method of its class Solution."""
    if not name.isidentifier():
        raise ValueError(f"{name!r} is no name of a function")
    if isinstance(given, str):  # one argument a line, as JSON
        # By newlines alone: a text may hold other characters at which str.splitlines breaks.
        given = [_json(line.removesuffix("\n")) for line in io.StringIO(given, newline=None)]
        wanted = _json(wanted) if isinstance(wanted, str) else wanted
    words = given if isinstance(given, Sequence) else [given]
    source = f"(Solution().{name} if 'Solution' in globals() else {name})(*{list(words)!r})"
    return Expected(Check("value", source), wanted, as_json=True)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _code(source: str, metadata: Mapping[str, Any]) -> RowTests:
    """Statements: each assert is a test where there is nothing else; otherwise all together are one."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"these are neither JSON nor Python: {_shown(source)} ({error})") from None
    ours = bound_names(_setup(metadata))
    if body and all(isinstance(each, ast.Assert) for each in body):
        return RowTests(checks=tuple(_assert(each, ours) for each in body if isinstance(each, ast.Assert)))
    entry = metadata.get("entry_point")
    if entry and (asserts := _of_check(body, str(entry))):
        return RowTests(checks=tuple(_assert(each, ours) for each in asserts))
    if entry and any(isinstance(each, ast.FunctionDef) and each.name == "check" for each in body):
        source = f"{source}\ncheck({entry})"
    elif prepares(body):
        return RowTests(prepared=source)
    return RowTests(checks=(Expected(Check("assert", source)),)) if body else RowTests()


def _joined(sources: Sequence[str]) -> str:
    return "\n".join(source for source in sources if source)


def _of_check(body: list[ast.stmt], entry: str) -> list[ast.Assert]:
    """The asserts of HumanEval's `check`, of the function itself, where it holds nothing else; else none."""
    checks = [each for each in body if isinstance(each, ast.FunctionDef) and each.name == "check"]
    if len(checks) != 1 or any(_literal(each.value) is None for each in body if isinstance(each, ast.Assign)):
        return []
    if not all(isinstance(each, ast.Assign) for each in body if each is not checks[0]) or len(checks[0].args.args) != 1:
        return []
    said = [each for each in checks[0].body if not isinstance(each, ast.Pass) and not _is_constant(each)]
    if not all(isinstance(each, ast.Assert) for each in said):
        return []
    candidate = checks[0].args.args[0].arg
    for name in (each for statement in said for each in ast.walk(statement) if isinstance(each, ast.Name)):
        name.id = entry if name.id == candidate else name.id
    return [each for each in said if isinstance(each, ast.Assert)]


def _is_constant(statement: ast.stmt) -> bool:
    """A text that explains, a name that does nothing, or `assert True`."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant | ast.Name)
    return isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Constant) and bool(statement.test.value)


def _assert(statement: ast.Assert, ours: frozenset[str]) -> Expected:
    """An assert that compares with a literal has its other side sent alone, so that the code never sees what is wanted.

    ours: names of the tests' own.
    """
    test = statement.test
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        sides = (test.left, test.comparators[0])
        values = [_literal(side) for side in sides]
        if isinstance(test.ops[0], ast.Eq) and (values[0] is None) != (values[1] is None):
            literal = values[0] or values[1]
            assert literal is not None
            if asks(side := sides[0] if values[0] is None else sides[1], ours):
                return Expected(Check("value", ast.unparse(side)), literal[0])
        if isinstance(test.ops[0], ast.Is) and values[1] is not None and values[0] is None and asks(sides[0], ours):
            return Expected(Check("value", ast.unparse(sides[0])), values[1][0], exactly=True)
    if (found := split(test)) is not None and asks(found[0], ours):
        return Expected(Check("value", ast.unparse(found[0])), rest=found[1])
    said, denied = (
        (test.operand, True) if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else (test, False)
    )
    # Whether yes is right, the code does not see.
    if isinstance(said, ast.Call) and root(said) not in BUILTINS | ours and asks(said, ours):
        return Expected(Check("value", f"not not {ast.unparse(said)}"), not denied)
    return Expected(Check("assert", ast.unparse(statement)))


def _literal(node: ast.expr) -> tuple[Any] | None:
    try:
        return (ast.literal_eval(node),)
    except NO_LITERAL:
        return None


def _text(value: Any) -> str:
    """Standard input or output: text, or a list of its lines."""
    if isinstance(value, str):
        return value
    return "\n".join(map(str, value)) if isinstance(value, Sequence) else str(value)


def _lists(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_lists(each) for each in value]
    return {key: _lists(each) for key, each in value.items()} if isinstance(value, dict) else value


def _shown(value: Any) -> str:
    return repr(value)[:SHOWN]
