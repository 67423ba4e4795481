import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from megarl.core.errors import MegarlError, UserError, WorkerDiedError
from megarl.rewards.grade import Grade
from megarl.rewards.graders import GraderPool

HERE = Path(__file__).parent


def pool(fn: str, workers: int = 1, timeout_s: float = 20.0, **keys: float) -> GraderPool:
    return GraderPool(fn if ":" not in fn else f"grading:{fn[1:]}", workers, timeout_s, folder=HERE, **keys)


def graded(responses: list[str], fn: str = ":naughty", workers: int = 1, timeout_s: float = 20.0) -> list[Grade]:
    async def run() -> list[Grade]:
        async with pool(fn, workers, timeout_s) as graders:
            return await asyncio.gather(*(graders.grade("p", response, "aaaa", {}) for response in responses))

    return asyncio.run(run())


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "megarl.rewards.worker" in child.cmdline()]


def test_grades_come_back_to_those_who_asked() -> None:
    responses = ["a" * length for length in range(300)]
    assert graded(responses, ":share", workers=2) == [Grade(length / 4) for length in range(300)]


def test_everything_comes_through_unchanged() -> None:
    async def run() -> Grade:
        async with pool(":echo") as graders:
            return await graders.grade("p\0é", "r\n" * 100_000, "", {"a": [1, {"b": None}]})

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
        assert graded(responses, workers=workers) == [
            Grade(0.0, failures[index]) if index in failures else Grade(0.5) for index in range(len(responses))
        ]


def test_what_a_function_prints_or_reads_does_not_disturb_the_pipes() -> None:
    assert graded(["print", "read", "fine"]) == [
        Grade(0.5),
        Grade(0.0, "error: EOFError: EOF when reading a line"),
        Grade(0.5),
    ]


def test_the_deadline_does_not_count_the_wait_for_a_turn() -> None:
    async def run() -> list[Grade]:
        async with pool(":naughty", timeout_s=0.75) as graders:
            return await asyncio.gather(
                *(graders.grade("", "hang", "", {}) for _ in range(2)), graders.grade("", "", "", {})
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
        under_way = asyncio.create_task(graders.grade("", "hang", "", {}))
        await graders.grade("", "", "", {})
        await graders.close()
        assert children() == []
        with pytest.raises(MegarlError, match="closed"):
            await graders.grade("", "", "", {})
        return (await asyncio.gather(under_way, return_exceptions=True))[0]

    assert isinstance(asyncio.run(run()), MegarlError)


def test_a_caller_that_gives_up_harms_nobody() -> None:
    async def run() -> Grade:
        async with pool(":naughty", timeout_s=0.75) as graders:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(graders.grade("", "hang", "", {}), timeout=0.05)
            return await graders.grade("", "", "", {})

    assert asyncio.run(run()) == Grade(0.5)


def test_what_a_hanging_function_started_dies_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pids"

    async def run() -> Grade:
        async with pool(":spawn_and_hang", timeout_s=2.0) as graders:
            return await graders.grade("", "", "", {"file": str(file)})

    assert asyncio.run(run()) == Grade(0.0, "timeout")
    for pid in map(int, file.read_text().split()):
        assert_ended(pid)


def test_a_function_that_cannot_be_found_is_the_users_error() -> None:
    with pytest.raises(UserError, match=r"has no 'shar'\. Did you mean 'share'"):
        graded([""], ":shar")
    assert children() == []


def test_a_process_that_does_not_come_up_is_named() -> None:
    with pytest.raises(WorkerDiedError, match=r"reward\.fn='grading:share' was not ready after 0\.001 s"):
        asyncio.run(pool(":share", start_timeout_s=0.001).start())


def test_killing_the_parent_ends_a_hanging_grader(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    os.mkfifo(file)
    script = f"""
        import asyncio
        from pathlib import Path
        from megarl.rewards.graders import GraderPool
        async def main():
            async with GraderPool("grading:spawn_and_hang", 1, 600, folder=Path({str(HERE)!r})) as graders:
                await graders.grade("", "", "", {{"file": {str(file)!r}}})
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
