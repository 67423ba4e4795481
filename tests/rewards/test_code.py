"""Code is graded by its row's tests, in real sandboxes; what code does to be graded better than it is does not help."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from megarl.core.errors import UserError, WorkerDiedError
from megarl.recipe.reward import Code, Reward
from megarl.rewards.check import check_graders
from megarl.rewards.code import CodeGrader, limits_of
from megarl.rewards.combine import Combined, Graders
from megarl.rewards.grade import Grade, Item

ADD = {"tests": {"inputs": ["1 2", "4 5", "0 0"], "outputs": ["3", "9", "0"]}}
DOUBLE = {"test_list": ["assert f(1) == 2", "assert f([1]) == [1, 1]", "assert f('') == ''", "assert f(2) > 3"]}
RIGHT = "print(sum(map(int, input().split())))"
WRONG_FOR_ZERO = "a, b = map(int, input().split())\nprint(a + b or 'none')"


def block(code: str) -> str:
    return f"I think so:\n```python\n{code}\n```\n"


def grades(cases: Sequence[tuple[str, dict[str, Any]]], **settings: Any) -> list[Grade]:
    async def run() -> list[Grade]:
        grader = CodeGrader(Code(kind="code", **settings))
        await grader.start()
        try:
            return await asyncio.gather(*(grader.grade(Item("", response, "", row)) for response, row in cases))
        finally:
            await grader.close()

    return asyncio.run(run())


def test_all_or_a_share_of_the_tests_pass() -> None:
    cases = [
        (block(RIGHT), ADD),
        (block(WRONG_FOR_ZERO), ADD),
        (block("def f(x): return x * 2"), DOUBLE),
        (block("def f(x): return x * 2 if x else None"), DOUBLE),
        (block("def f(x): raise SystemExit"), DOUBLE),
        (block("syntax error"), DOUBLE),
        ("no code at all", ADD),
        (f"<think>{block(RIGHT)}</think>I would say 3.", ADD),
    ]
    assert [each.reward for each in grades(cases)] == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    shares = [each.reward for each in grades(cases, score="share")]
    assert shares == pytest.approx([1.0, 2 / 3, 1.0, 3 / 4, 0.0, 0.0, 0.0, 0.0])


def test_code_within_thinking_that_the_prompt_opened_is_none() -> None:
    thinking = {**ADD, "thinking_ends": "</think>"}
    found = grades([(block(RIGHT), thinking), (f"Hm.</think>{block(RIGHT)}", thinking)])
    assert [each.reward for each in found] == [0.0, 1.0]


def test_it_is_one_of_the_graders_of_a_recipe() -> None:
    settings = {
        "passes": {"kind": "code", "score": "share", "weight": 2.0},
        "right": {"kind": "rule", "fn": "exact", "weight": 0},
    }

    async def run() -> Combined:
        graders = Graders.open(Reward.model_validate({"graders": settings}))
        await graders.start()
        try:
            return await graders.grade(Item("", block(WRONG_FOR_ZERO), "3", ADD))
        finally:
            await graders.close()

    found = asyncio.run(run())
    assert found.failure is None
    assert found.reward == pytest.approx(4 / 3)
    assert found.parts == {"passes": pytest.approx(2 / 3), "right": 0.0}


def test_settings_are_heeded() -> None:
    slow = "import time; time.sleep(60)\n" + RIGHT
    hungry = "held = bytearray(100 * 2**20)\n" + RIGHT
    talking = "print('x' * 5000)\n" + RIGHT
    row = {"mine": ADD["tests"], "tests": {"inputs": ["1 2"], "outputs": ["4"]}}
    cases = [(block(code), row) for code in (RIGHT, slow, hungry, talking)] + [(block(WRONG_FOR_ZERO), row)]
    tight = {"field": "mine", "timeout_s": 3.0, "memory_mb": 64, "output_kb": 1, "max_tests": 2, "sandboxes": 2}
    assert [each.reward for each in grades(cases[:1])] == [0.0]  # the field that data sets have it in
    assert [each.reward for each in grades(cases, **tight)] == [1.0, 0.0, 0.0, 0.0, 1.0]
    limits = limits_of(Code(kind="code", disk_mb=8, processes=9))
    assert (limits.disk_bytes, limits.file_bytes, limits.processes) == (8 * 2**20, 8 * 2**20, 9)


def test_programs_that_wait_for_a_sandbox_are_not_under_way() -> None:
    async def run() -> float:
        grader, oldest = CodeGrader(Code(kind="code", sandboxes=1)), 0.0
        await grader.start()
        slow = block("import time; time.sleep(0.2)\n" + RIGHT)
        row = {"tests": {"inputs": ["1 2"], "outputs": ["3"]}}
        grading = asyncio.gather(*(grader.grade(Item("", slow, "", row)) for _ in range(6)))
        while not grading.done():
            await asyncio.sleep(0.01)
            at = grader.oldest()
            oldest = max(oldest, 0.0 if at is None else at.for_s)
        assert [each.reward for each in await grading] == [1.0] * 6
        await grader.close()
        return oldest

    began = time.monotonic()
    oldest = asyncio.run(run())
    assert 0.1 < oldest < (time.monotonic() - began) / 2


CHEATS = {
    "an end before the tests": "import os\nos._exit(0)",
    "an end that looks orderly": "import sys\nsys.exit(0)",
    "an object that is equal to all": "class E(int):\n    def __eq__(self, other): return True\ndef f(x): return E()",
    "another comparison": "import builtins\nbuiltins.repr = lambda x: '2'\ndef f(x): return 3",
    "tests that are looked for": "import gc, sys\nfound = [x for x in gc.get_objects() if 'assert f(1)' in str(x)[:1000]]\n"
    "def f(x): return sys._getframe(1).f_locals.get('expected', found)",
    "what it prints": "print('all tests passed')",
    "a value that overflows, in the runner's place": "import sys, time\nframe = sys._getframe()\n"
    "while 'channel' not in frame.f_locals: frame = frame.f_back\nchannel = frame.f_locals['channel']\n"
    "channel.write(b'done'), channel.read(), channel.write(b'+0x' + b'f' * 1000 + b'+1j'), time.sleep(600)",
    "a thread that stays": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()",
}


IN_THE_RUNNERS_PLACE = """import sys, time
frame = sys._getframe()
while 'channel' not in frame.f_locals: frame = frame.f_back
channel = frame.f_locals['channel']
channel.write(b'done')
while True:
    kind, source = channel.read()
    channel.write(b'+' + SAID)"""
FORGED = ("", "True", "2", "2.0", "set([2, 3])", "[2, 3]", "('value', True, {})")
LENIENT = {
    "close": {"test_list": ["assert abs(f(1) - 7.0) < 1e-6"]},
    "a set": {"test_list": ["assert set(f(1)) == set([4, 5])"]},
    "not": {"test_list": ["assert f(1)", "assert not f(0)"]},
    "isclose": {"test_list": ["import math", "assert math.isclose(f(1), 7.0)"]},
    "all": {"test_list": ["assert all(f(x) == y for x, y in [(1, 7), (0, 7)])"]},
    "check": {"test": "def check(candidate):\n    assert candidate(1) == 7", "entry_point": "f"},
}


def test_a_verdict_cannot_be_said_in_the_runners_place() -> None:
    """The code sees what is called and not what is wanted of it."""
    forged = [block(IN_THE_RUNNERS_PLACE.replace("SAID", repr(said.encode()))) for said in FORGED]
    found = grades([(code, row) for code in forged for row in LENIENT.values()], timeout_s=5.0)
    assert found == [Grade(0.0)] * len(found)
    seven = "def f(x): return 7"
    honest = ["def f(x): return 7.0000001", "def f(x): yield from (5, 4)", "def f(x): return x", seven, seven, seven]
    found = grades([(block(code), row) for code, row in zip(honest, LENIENT.values(), strict=True)])
    assert found == [Grade(1.0)] * len(honest)


def test_infinity_comes_out_of_a_sandbox() -> None:
    row = {"test_list": ["assert f(1) == float('inf')", "assert f(-1) == -float('inf')"]}
    right, wrong = "def f(x): return x * float('inf')", "def f(x): return float('nan')"
    assert grades([(block(right), row), (block(wrong), row)]) == [Grade(1.0), Grade(0.0)]


@pytest.mark.parametrize("name", CHEATS)
def test_what_has_no_function_does_not_pass(name: str, cheated: dict[str, Grade]) -> None:
    assert cheated[name] == Grade(0.0)


@pytest.fixture(scope="module")
def cheated() -> dict[str, Grade]:
    row = {"test_list": ["assert f(1) == 2"]}
    found = grades([(block(code), row) for code in CHEATS.values()], timeout_s=5.0)
    return dict(zip(CHEATS, found, strict=True))


def test_a_row_without_tests_is_a_failure_and_no_zero() -> None:
    [missing, broken] = grades([(block(RIGHT), {"other": 1}), (block(RIGHT), {"tests": "assert ("})])
    assert missing.failure is not None and "the row has no tests" in missing.failure
    assert broken.failure is not None and "neither JSON nor Python" in broken.failure


def test_a_row_that_no_program_can_pass_is_a_failure_and_no_zero() -> None:
    """Its input does not go into a sandbox's folder, or what it wants is more than a program may print."""
    long = "1\n" * 2**20
    [given] = grades([(block(RIGHT), {"tests": {"inputs": [long], "outputs": ["3"]}})], disk_mb=1)
    assert given.failure is not None and "do not go into a sandbox's folder of 1048576 bytes" in given.failure
    row = {"tests": {"inputs": ["1 2", "3"], "outputs": ["3", long]}}
    [wanted] = grades([(block(RIGHT), row)])
    assert (
        wanted.failure is not None
        and "its test 2 wants 2097151 bytes of output, and output_kb is 256" in wanted.failure
    )
    [share] = grades([(block(RIGHT), row)], score="share")
    assert share == Grade(0.5)
    for count, failure in (
        (21_000, None),
        (22_000, "its test 1 wants a value of 65998 characters, and one of up to 65536"),
    ):
        code = f"def f(): return [0] * {count}"
        [value] = grades([(block(code), {"tests": {"fn_name": "f", "inputs": [[]], "outputs": [[0] * count]}})])
        assert value.reward == (failure is None) and (failure or "") in (value.failure or "")
    # 1 is 1.0 to Python, and takes less.
    [short] = grades([(block("def f(): return [1] * 20000"), {"tests": f"assert f() == {[1.0] * 20_000}"})])
    assert short == Grade(1.0)


def test_where_no_sandbox_can_be_had_any_more_the_run_is_told() -> None:
    async def run() -> None:
        grader = CodeGrader(Code(kind="code", sandboxes=1))
        await grader.start()
        try:
            under_way = asyncio.ensure_future(grader.grade(Item("", block("while True: pass"), "", ADD, "row 7")))
            await asyncio.sleep(0)
            assert (oldest := grader.oldest()) is not None and oldest.row == "row 7"
            grader._pool._process.kill()
            with pytest.raises(WorkerDiedError):
                await under_way
            assert grader.oldest() is None
        finally:
            await grader.close()

    asyncio.run(run())


def test_a_recipe_is_refused_where_sandboxes_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = Reward.model_validate({"graders": {"tests": {"kind": "code"}}})
    check_graders(reward)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"`reward\.graders\.tests`: .*apt install bubblewrap"):
        check_graders(reward)
