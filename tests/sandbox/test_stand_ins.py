"""Checks that run apart from the code: they see what they would see beside it, and nothing that the code says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from megarl.sandbox import watch
from megarl.sandbox.job import BESIDE, Check, Limits, Result
from megarl.sandbox.pool import SandboxPool
from tests.support.other_user import REPOSITORY

LIMITS = Limits(timeout_s=20)
DEADLINE_S = 100


def results(
    cases: Sequence[tuple[str, str, tuple[str, ...]]], *, size: int = 2, timeout_s: float = 20.0
) -> list[Result]:
    async def run() -> list[Result]:
        async with asyncio.timeout(DEADLINE_S), SandboxPool(LIMITS, size) as pool:
            return await asyncio.gather(
                *(
                    pool.run(code, checks=(Check("apart", test, names),), timeout_s=timeout_s)
                    for code, test, names in cases
                )
            )

    return asyncio.run(run())


def said(found: Result) -> tuple[list[bool], list[str]]:
    return [each.ok for each in found.checked], [each.text for each in found.checked]


STACK = """class Stack:
    kinds = 2
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, at): return self.items[at]"""
POINT = """class Point:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
    def __mul__(self, by): return Point(self.x * by, self.y * by)
    __rmul__ = __mul__
    def __eq__(self, other): return isinstance(other, Point) and (self.x, self.y) == (other.x, other.y)
    def __lt__(self, other): return self.x < other.x
    def __str__(self): return f'{self.x},{self.y}'"""
SAME = "def f(x): return x"
HONEST = {
    "a loop": ("def f(x): return 2 * x", "for x in range(5):\n    assert f(x) == x + x"),
    "both sides": ("def f(x): return sorted(x)", "assert f([2, 1]) == f((1, 2)) != f([3])"),
    "names": ("def f(x, *, by=2): return x * by\nLIMIT = 4", "y = f(3)\nassert y == 6 and f(y, by=3) == 18 and LIMIT == 4"),
    "a callee of a builtin's name": ("def f(x): return len(x)\ndef len(x): return 7", "assert f([]) == 7"),
    "data": (
        SAME,
        "import math, datetime\nfrom collections import deque, Counter\nfrom decimal import Decimal\n"
        "from fractions import Fraction\n"
        "for x in (None, True, 1.5, -2, 1e999, -1e999, 1 - 2j, 'a\\0é\\ud800', b'\\xff', [], (1,), {1: {2: set()}},\n"
        "          {frozenset({1})}, range(1, 9, 2), bytearray(b'a'), deque([1, [2]]), Counter('aab'), Decimal('0.10'),\n"
        "          Fraction(-1, 3), datetime.date(2024, 2, 29), datetime.datetime(2024, 1, 1, 2), datetime.timedelta(1, 2),\n"
        "          7 ** 9000, -7 ** 9000):\n"
        "    assert f(x) == x, x\nassert math.isnan(f(math.nan)) and type(f(True)) is bool and type(f(1)) is int",
    ),
    "an object": (
        STACK,
        "s = Stack()\ns.push(1)\ns.push([2])\nassert len(s) == 2 and s.pop() == [2] and s.items == [1] and list(s) == [1]\n"
        "assert s[0] == 1 and 1 in s and Stack.kinds == 2 and isinstance(s, Stack) and hasattr(s, 'pop')\ns.items = [5]\n"
        "assert s.pop() == 5 and not hasattr(s, 'peek')",
    ),
    "operators": (
        POINT,
        "a = Point(1, 2)\nassert a + a == Point(2, 4) == 2 * a == a * 2 != a\nassert str(a) == f'{a}' == '1,2' and a < a + a\n"
        "assert a != (1, 2) and (a + a).y == 4 and sorted([a + a, a])[0] == a",
    ),
    "a generator": (
        "def f(n):\n    yield from range(n)",
        "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6 and max(f(3)) == 2\nmade = f(1)\nassert next(made) == 0\n"
        "try:\n    next(made)\nexcept StopIteration:\n    pass\nelse:\n    raise AssertionError",
    ),
    "what it changes": (
        "def f(x, y=None):\n    x.clear()\n    x.update({1: 2}) if isinstance(x, dict) else x.extend([1])",
        "x, y = [3, 2], {5: 6}\nassert f(x) is None and f(y) is None\nassert (x, y) == ([1], {1: 2})",
    ),
    "what it raises": (
        "def f(x): raise ValueError('no ' + x)",
        "try:\n    f('way')\nexcept ValueError as error:\n    assert str(error) == 'no way'\nelse:\n    raise AssertionError",
    ),
    "a function that it is given": ("def f(g, x): return g(x)", "for x in range(3):\n    assert f(lambda y: y + 1, x) == x + 1"),
    "a large value": (
        "def f(n): return list(range(n))", 
        "assert f(50_000) == list(range(50_000))\nx = f(50_000)\nassert f(len(x)) == x",
    ),
}  # fmt: skip
NAMES = ("f", "LIMIT", "Stack", "Point")


@pytest.fixture(scope="module")
def honest() -> dict[str, Result]:
    found = results([(code, test, NAMES) for code, test in HONEST.values()])
    return dict(zip(HONEST, found, strict=True))


@pytest.mark.parametrize("name", HONEST)
def test_they_hold_of_code_that_does_what_they_want(name: str, honest: dict[str, Result]) -> None:
    assert said(honest[name])[0] == [True], said(honest[name])[1]


EQUAL = "class E({}):\n    def __eq__(self, other): return True\n    __ne__ = lambda self, other: False\n    __hash__ = None\n"
EQUAL += "    def __lt__(self, other): return True\n    __le__ = __gt__ = __ge__ = __contains__ = __lt__\n"
EQUAL += "    def __sub__(self, other): return 0\n    __rsub__ = __sub__\n    def __bool__(self): return True\n"
EQUAL += "    def __iter__(self): raise IndexError\ndef f(*x): return E()"
INSTEAD = """import sys, time
frame = sys._getframe()
while 'channel' not in frame.f_locals: frame = frame.f_back
channel = frame.f_locals['channel']
channel.write(b'done')
while True:
    channel.read()
    channel.write(SAID)"""
PATCHED = """import builtins, math, random, operator
for module in (builtins, math, random, operator):
    for name in ('all', 'any', 'isinstance', 'len', 'isclose', 'sum', 'abs', 'eq', 'randint', 'choice'):
        if hasattr(module, name): setattr(module, name, lambda *a, **k: True)
def f(*x): return True"""
LYING = {
    "an object": EQUAL.format(""),
    "a number": EQUAL.format("int"),
    "a list": EQUAL.format("list"),
    "other functions of Python's": PATCHED,
    "an end": "import os, sys\ndef f(*x): os._exit(0)",
    "an orderly end": "import sys\ndef f(*x): sys.exit(0)",
    "the end of a loop": "def f(*x): raise StopIteration",
    "a wait": "import time\ndef f(*x): time.sleep(600)",
    "an exit in the runner's place": INSTEAD.replace("SAID", "b\"+__import__('os')._exit(0)\""),
    "a call in the runner's place": INSTEAD.replace("SAID", "b\"+('value', _made('os._exit', 0), {})\""),
    "an object in the runner's place": INSTEAD.replace("SAID", "b\"+('held', 0, {})\""),
    "a number in the runner's place": INSTEAD.replace("SAID", "b\"+('value', 1, {})\""),
    "another list in the runner's place": INSTEAD.replace("SAID", "b\"+('value', [], {0: []})\""),
    "an end in the runner's place": INSTEAD.replace("SAID", "b'-SystemExit: 0'"),
    "nonsense in the runner's place": INSTEAD.replace("SAID", "b'+' + b'(' * 5000"),
}  # fmt: skip
ANY = """import math
def loop():
    for x in range(2, 5):
        assert f(x) == x + 1
def several():
    assert all(f(x) == y for x, y in [(2, 3), (3, 4)])
def near():
    for x, y in zip(map(f, [2, 3]), [3, 4]):
        assert abs(x - y) < 1e-6
def kind():
    assert math.isclose(f(3), 4.0) and isinstance(f(3), int)
def member():
    x = f([2, 1])
    assert x in ([1, 2], (1, 2)) or {1: 2} == x
held = []
for test in (loop, several, near, kind, member):
    try:
        test()
    except Exception:
        continue
    held.append(test)
assert held"""


@pytest.fixture(scope="module")
def lying() -> dict[str, Result]:
    found = results([(code, ANY, ("f",)) for code in ("def f(x): return x + 1", *LYING.values())], timeout_s=5.0)
    return dict(zip(("no lie", *LYING), found, strict=True))


@pytest.mark.parametrize("name", LYING)
def test_none_holds_of_code_that_lies(name: str, lying: dict[str, Result]) -> None:
    assert not any(each.ok for each in lying[name].checked)
    assert said(lying["no lie"])[0] == [True]


def test_what_the_code_does_not_have_is_no_name() -> None:
    [found] = results([("def f(): pass", "g()", ("f", "g"))])
    assert found.checked[0].text.endswith("NameError: name 'g' is not defined\n")


def test_a_pool_of_one_runs_several_at_once() -> None:
    """Each needs a second sandbox, for which it does not wait in vain."""
    found = results([(SAME, "for x in range(300):\n    assert f(x) == x", ("f",))] * 4, size=1)
    assert [said(each)[0] for each in found] == [[True]] * 4


@pytest.mark.parametrize("code", ["def f(x):\n    while True: pass", "import os\ndef f(x): os._exit(1)"])
@pytest.mark.parametrize(
    "after_s", [0.05, 0.1, 0.15, 1.0]
)  # while the code runs, while the second sandbox starts, in the check
def test_nothing_is_left_of_a_check_that_is_given_up(code: str, after_s: float) -> None:
    check = Check("apart", "for x in range(9):\n    assert f(x) == x", ("f",))

    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), SandboxPool(LIMITS, 1) as pool:
            given_up = asyncio.ensure_future(pool.run(code, checks=(check,)))
            await asyncio.wait({given_up}, timeout=after_s)
            given_up.cancel()
            assert [each.ok for each in (await pool.run(SAME, checks=(check,))).checked] == [True]
            assert pool._process is not None
            for _ in range(200):
                if len(watch.children(pool._process.pid)) == 1:
                    break
                await asyncio.sleep(0.05)
            assert len(watch.children(pool._process.pid)) == 1

    asyncio.run(run())


def test_what_cannot_be_run_apart_says_so_by_one_number() -> None:
    source = Path(REPOSITORY, "megarl", "sandbox", "stand_ins.py").read_text()
    assert f"BESIDE = {BESIDE}  #" in source
