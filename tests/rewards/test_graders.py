import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megarl.core.errors import MegarlError, UserError, WorkerDiedError
from megarl.rewards.grade import Grade, Item
from megarl.rewards.graders import GraderPool
from megarl.rewards.printed import MOST_PRINTED

HERE = Path(__file__).parent
LINE = re.compile(r" \([^()]+\.py, line \d+\)$")


def pool(fn: str, workers: int = 1, timeout_s: float = 20.0, **keys: float) -> GraderPool:
    return GraderPool(fn if ":" not in fn else f"grading:{fn[1:]}", workers, timeout_s, folder=HERE, **keys)


def graded(responses: list[str], fn: str = ":naughty", workers: int = 1, timeout_s: float = 20.0) -> list[Grade]:
    async def run() -> list[Grade]:
        async with pool(fn, workers, timeout_s) as graders:
            return await asyncio.gather(*(graders.grade(Item("p", response, "aaaa")) for response in responses))

    return asyncio.run(run())


def children() -> list[psutil.Process]:
    alive = (child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE)
    return [child for child in alive if "megarl.rewards.worker" in child.cmdline()]


def test_grades_come_back_to_those_who_asked() -> None:
    responses = ["a" * length for length in range(300)]
    assert graded(responses, ":share", workers=2) == [Grade(length / 4) for length in range(300)]


def test_a_function_that_names_it_is_told_whether_the_response_was_cut_off() -> None:
    async def run(fn: str) -> list[Grade]:
        async with pool(fn) as graders:
            asked = (graders.grade(Item("p", "aa", "aaaa", {}, truncated=truncated)) for truncated in (False, True))
            return list(await asyncio.gather(*asked))

    assert asyncio.run(run(":whole")) == [Grade(1.0), Grade(0.0)]
    assert asyncio.run(run(":rest")) == [Grade(0.5), Grade(0.5)], "what it hands on to knows no such parameter"


def test_everything_comes_through_unchanged() -> None:
    async def run() -> Grade:
        async with pool(":echo") as graders:
            return await graders.grade(Item("p\0é", "r\n" * 100_000, "", {"a": [1, {"b": None}]}))

    assert asyncio.run(run()) == Grade(1.0)


def test_built_in_graders_need_no_folder_and_no_torch() -> None:
    assert graded(["#### aaaa", "#### 3", "none"], "math") == [Grade(1.0), Grade(0.0), Grade(0.0)]
    assert graded([""], ":torch_is_loaded") == [Grade(0.0)]


def test_a_hang_is_a_counted_failure_and_the_others_are_graded() -> None:
    grades = graded(["fine", "hang", "fine", "fine"], timeout_s=1.0)
    assert grades == [Grade(0.5), Grade(0.0, "timeout"), Grade(0.5), Grade(0.5)]


def test_raising_and_crashing_graders_fail_alone() -> None:
    responses = ["fine", "raise", "die", "fine", "segfault", "nan", "exit", *["fine"] * 200]
    failures = {
        1: "error: ValueError: boom",
        2: "error: the grader process died: exit code 3",
        4: "error: the grader process died: signal SIGSEGV",
        5: "not a number: nan",
        6: "error: SystemExit: 4",
    }
    for workers in (1, 2):
        found = graded(responses, workers=workers)
        assert [replace(each, failure=each.failure and LINE.sub("", each.failure)) for each in found] == [
            Grade(0.0, failures[index]) if index in failures else Grade(0.5) for index in range(len(responses))
        ]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_grade_whose_process_was_killed_from_outside_is_tried_once_more(tmp_path: Path, workers: int) -> None:
    asked = [str(tmp_path / str(index)) for index in range(6)]
    assert graded(asked, ":killed_once", workers) == [Grade(0.5)] * 6


def test_a_response_that_kills_twice_has_failed() -> None:
    killed = Grade(0.0, "error: the grader process died: signal SIGKILL")
    assert graded(["fine", "killed", "fine", "killed", "fine"], workers=2) == [
        Grade(0.5),
        killed,
        Grade(0.5),
        killed,
        Grade(0.5),
    ]


def test_what_a_function_prints_or_reads_does_not_disturb_the_pipes() -> None:
    printed, read, fine = graded(["print", "read", "fine"])
    assert (printed, fine) == (Grade(0.5), Grade(0.5))
    assert LINE.sub("", str(read.failure)) == "error: EOFError: EOF when reading a line"


def rows_graded(asked: list[tuple[str, str]], workers: int = 1, timeout_s: float = 0.5) -> list[Grade]:
    """Of responses with the rows of their prompts, all at once."""

    async def run() -> list[Grade]:
        async with pool(":naughty", workers, timeout_s) as graders:
            return await asyncio.gather(*(graders.grade(Item("p", response, "a", {}, row)) for row, response in asked))

    return asyncio.run(run())


def outcome(grade: Grade) -> str:
    return "graded" if grade.failure is None else grade.failure.split(",")[0]


def test_a_grader_that_hangs_at_one_row_after_the_other_is_not_waited_for_each_time() -> None:
    began = time.monotonic()
    grades = rows_graded([(f"row {index // 2}", "hang") for index in range(500)])
    assert time.monotonic() - began < 30, "500 deadlines of half a second are four minutes"
    # Three rows have hung after five responses; nobody is asked after that.
    assert [outcome(grade) for grade in grades] == ["timeout"] * 5 + ["timeout: not tried"] * 495
    assert grades[-1].failure == "timeout: not tried, because 5 grades in a row were lost before it"


def test_a_row_whose_responses_hang_is_given_up_and_the_others_are_graded() -> None:
    grades = rows_graded([*[("bad", "hang")] * 6, *[("good", "fine")] * 3, *[("another", "die")] * 4])
    assert [outcome(grade) for grade in grades[:9]] == ["timeout"] * 3 + ["timeout: not tried"] * 3 + ["graded"] * 3
    assert [outcome(grade) for grade in grades[9:]] == [
        *["error: the grader process died: exit code 3"] * 3,
        "timeout: not tried",
    ]


def test_what_is_asked_for_after_others_were_given_up_is_tried() -> None:
    async def run() -> list[Grade]:
        async with pool(":naughty", timeout_s=0.3) as graders:
            await asyncio.gather(*(graders.grade(Item("", "hang", "", {}, f"row {index}")) for index in range(9)))
            return [await graders.grade(Item("", response, "", {}, "row 1")) for response in ("hang", "fine", "hang")]

    assert [outcome(grade) for grade in asyncio.run(run())] == ["timeout", "graded", "timeout"]


def test_what_it_is_at_is_known() -> None:
    async def run() -> None:
        async with pool(":naughty", workers=2, timeout_s=5.0) as graders:
            assert graders.oldest() is None
            under_way = [
                asyncio.create_task(graders.grade(Item("", "hang", "", {}, row))) for row in ("a.jsonl:3", "b")
            ]
            while (at := graders.oldest()) is None or at.for_s < 0.2:
                await asyncio.sleep(0.01)
            assert at.row == "a.jsonl:3"
            for task in under_way:
                task.cancel()

    asyncio.run(run())


def test_what_a_function_prints_is_bounded(capfd: pytest.CaptureFixture[str]) -> None:
    assert graded(["print"] * 40, workers=2) == [Grade(0.5)] * 40
    printed = capfd.readouterr().err
    assert MOST_PRINTED <= len(printed) < MOST_PRINTED + 200
    assert printed.endswith(f"[reward.fn: what it prints after these {MOST_PRINTED} bytes is left out]\n")


def test_what_cannot_even_be_shown_is_a_failure_like_others() -> None:
    *odd, fine = graded(["number", "raise", "fine"], ":odd")
    assert [LINE.sub("", str(grade.failure)) for grade in odd] == [
        "error: RuntimeError: no",
        "error: OddError: (it cannot be shown: RuntimeError)",
    ]
    assert fine == Grade(0.5)


def test_the_deadline_does_not_count_the_wait_for_a_turn() -> None:
    async def run() -> list[Grade]:
        async with pool(":naughty", timeout_s=0.75) as graders:
            return await asyncio.gather(
                *(graders.grade(Item("", "hang", "")) for _ in range(2)), graders.grade(Item("", "", ""))
            )

    assert asyncio.run(run()) == [Grade(0.0, "timeout")] * 2 + [Grade(0.5)]


def test_work_is_shared_between_the_processes() -> None:
    pids = {grade.reward for grade in graded([""] * 50, ":pid", workers=2)}
    assert len(pids) == 2


def test_closing_ends_every_process_and_refuses_what_is_left() -> None:
    async def run() -> BaseException | Grade:
        graders = pool(":naughty", workers=2)
        await graders.start()
        assert len(children()) == 2
        under_way = asyncio.create_task(graders.grade(Item("", "hang", "")))
        await graders.grade(Item("", "", ""))
        await graders.close()
        assert children() == []
        with pytest.raises(MegarlError, match="closed"):
            await graders.grade(Item("", "", ""))
        return (await asyncio.gather(under_way, return_exceptions=True))[0]

    assert isinstance(asyncio.run(run()), MegarlError)


def test_a_caller_that_gives_up_harms_nobody() -> None:
    async def run() -> Grade:
        async with pool(":naughty", timeout_s=0.75) as graders:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(graders.grade(Item("", "hang", "")), timeout=0.05)
            return await graders.grade(Item("", "", ""))

    assert asyncio.run(run()) == Grade(0.5)


def test_what_a_hanging_function_started_dies_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pids"

    async def run() -> Grade:
        async with pool(":spawn_and_hang", timeout_s=2.0) as graders:
            return await graders.grade(Item("", "", "", {"file": str(file)}))

    assert asyncio.run(run()) == Grade(0.0, "timeout")
    for pid in map(int, file.read_text().split()):
        assert_ended(pid)


def test_a_function_that_cannot_be_found_is_the_users_error() -> None:
    with pytest.raises(UserError, match=r"has no 'shar'\. Did you mean 'share'"):
        graded([""], ":shar")
    assert children() == []


def test_a_process_that_does_not_come_up_is_named() -> None:
    with pytest.raises(WorkerDiedError, match=r"reward\.fn='grading:share' was not ready after 0 s"):
        asyncio.run(pool(":share", start_timeout_s=0.0).start())


def test_killing_the_parent_ends_a_hanging_grader(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    os.mkfifo(file)
    script = f"""
        import asyncio
        from pathlib import Path
        from megarl.rewards.grade import Item
        from megarl.rewards.graders import GraderPool
        async def main():
            async with GraderPool("grading:spawn_and_hang", 1, 600, folder=Path({str(HERE)!r})) as graders:
                await graders.grade(Item("", "", "", {{"file": {str(file)!r}}}))
        asyncio.run(main())
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    grader, child = map(int, file.read_text().split())  # blocks until the function writes, and then hangs
    parent.kill()
    parent.wait()
    assert_ended(grader)
    os.kill(child, signal.SIGKILL)  # in a run, the janitor ends what a killed grader has started


def assert_ended(pid: int) -> None:
    """Wait, boundedly, until a process that has been killed is gone."""
    if psutil.pid_exists(pid):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            process.wait(timeout=5)


def test_a_pool_works_on_an_event_loop_of_another_thread() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(graded, ["a"], ":share").result() == [Grade(0.25)]
