"""What a pool gives back, and that nothing is left of it, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import MegarlError, UserError, WorkerDiedError
from megarl.sandbox import watch
from megarl.sandbox.cell import StartError
from megarl.sandbox.cgroups import PREFIX
from megarl.sandbox.job import MIB, MOST_VALUE, Check, Limits
from megarl.sandbox.keeper import Keeper
from megarl.sandbox.pool import SandboxPool
from tests.support.other_user import REPOSITORY
from tests.support.processes import ended, open_files

LIMITS = Limits(timeout_s=20, memory_bytes=96 * MIB, output_bytes=1000)
SLEEP = "import time; time.sleep(600)"
MARKED = "import os\nos.execv('/python/bin/python3', ['python3', '-c', 'import time; time.sleep(600) # marked'])"
DEADLINE_S = 60


def in_pool(work: Callable[[SandboxPool], Awaitable[Any]], size: int = 2) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(DEADLINE_S), SandboxPool(LIMITS, size) as pool:
            return await work(pool)

    return asyncio.run(run())


def groups(keeper: int) -> list[Path]:
    """A keeper's control groups; those of others come and go."""
    folders = os.walk("/sys/fs/cgroup")  # passes over what vanishes meanwhile
    return [Path(above) / name for above, names, _ in folders for name in names if name == f"{PREFIX}{keeper}"]


def marked(keeper: int) -> set[int]:
    """Pids of the programs of `MARKED` that run."""
    found = set()
    for pid in watch.tree(keeper):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if b"# marked" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not true():
            await asyncio.sleep(0.02)


def test_results_say_how_a_program_ended() -> None:
    async def work(pool: SandboxPool) -> Any:
        return await asyncio.gather(
            pool.run("print(input(), open('/dev/stdin').read())", stdin="first\nsecond"),
            pool.run("import sys\nprint('before')\nsys.exit(3)"),
            pool.run("def f(): raise ValueError('what')\nf()"),
            pool.run("import os\nos.abort()"),
            pool.run("print('é' * 2000)"),
            pool.run("import helper, sys\nprint(helper.x, open('data/a.txt').read(), __name__, sys.argv)",
                     files={"helper.py": "x = 7", "data/a.txt": b"words"}),
            pool.run("while True: pass", timeout_s=0.5),
            pool.run("def broken(:"),
            pool.run("quit()"),
            pool.run("import os\nos.write(1, b'x' * 1001)\nos._exit(0)"),
            pool.run("def f(nums: List[int]): return sum(nums)\nprint(f([1, 2]))"),
        )  # fmt: skip

    plain, code, raised, aborted, long, files, late, syntax, quitted, short, annotated = in_pool(work)
    assert (annotated.ended, annotated.stdout) == ("ok", "3\n")
    assert (plain.ended, plain.stdout, plain.stderr, plain.exit_code) == ("ok", "first first\nsecond\n", "", 0)
    assert (code.ended, code.stdout, code.exit_code) == ("error", "before\n", 3)
    assert raised.stderr == (
        'Traceback (most recent call last):\n  File "main.py", line 2, in <module>\n    f()\n'
        "  File \"main.py\", line 1, in f\n    def f(): raise ValueError('what')\n"
        "             ^^^^^^^^^^^^^^^^^^^^^^^^\nValueError: what\n"
    )
    assert (aborted.ended, aborted.signal, aborted.exit_code) == ("error", "SIGABRT", None)
    assert (long.ended, long.stdout_cut, long.stdout) == ("output", True, "é" * 500 + "\n[cut after 1000 bytes]\n")
    assert files.stdout == "7 words __main__ ['main.py']\n"
    assert (late.ended, late.exit_code, late.reason) == ("timeout", None, "it ran for longer than 0.5 s")
    assert (syntax.ended, syntax.stderr.splitlines()[-1]) == ("error", "SyntaxError: invalid syntax")
    assert quitted.ended == "ok"
    assert (short.ended, short.stdout_cut) == ("output", True)  # it ended before anybody could end it


def test_each_has_a_sandbox_of_its_own() -> None:
    code = "import os\nprint(os.listdir('.'))\nopen('mark', 'w').close()"
    found = in_pool(lambda pool: asyncio.gather(*(pool.run(code) for _ in range(6))))
    assert {each.stdout for each in found} == {"['.stdin', 'main.py']\n"}


def test_checks_come_after_the_code_and_say_values() -> None:
    async def work(pool: SandboxPool) -> Any:
        code = "class Same(dict):\n    def __eq__(self, other): return True\ndef f(x): return Same({x: (1, 2.5, 'a', {3})})"
        return await asyncio.gather(
            pool.run(
                code, checks=(Check("value", "f(1)"), Check("assert", "assert f(1) == 2"), Check("value", "1 / 0"))
            ),
            pool.run("def f(): return object()", checks=(Check("value", "f()"), Check("value", "float('nan')"))),
            pool.run("import os\nos._exit(0)", checks=(Check("assert", "assert False"),)),
            pool.run("raise SystemExit", checks=(Check("value", "1"),)),
            pool.run("import atexit, time\natexit.register(time.sleep, 600)", checks=(Check("value", "set()"),)),
        )

    values, odd, left, ended_early, hanging = in_pool(work)
    assert eval(values.checked[0].text) == {1: (1, 2.5, "a", {3})}
    # A class of the code's own may say so of itself; who compares the value outside is not told so.
    assert [each.ok for each in values.checked] == [True, True, False]
    assert values.checked[2].text == "ZeroDivisionError: division by zero"
    assert [each.ok for each in odd.checked] == [False, False]
    assert "it is a object, which has no literal" in odd.checked[0].text
    assert (left.ended, left.checked) == ("ok", ())
    assert ended_early.checked[0].text == "1"
    assert (hanging.ended, hanging.checked[0].text) == ("ok", "set()")


def test_the_longest_value_is_the_runners() -> None:
    source = Path(REPOSITORY, "megarl", "sandbox", "runner.py").read_text()
    assert f"MOST_TEXT = {MOST_VALUE}  #" in source


@pytest.mark.parametrize("end", ["sys.stdout.close()", "sys.stdout = None"])
def test_checks_come_after_a_program_that_closes_its_output(end: str) -> None:
    code = f"import sys\ndef f(x): return 2 * x\n{end}"
    found = in_pool(lambda pool: pool.run(code, checks=(Check("value", "f(2)"),)), size=1)
    assert [each.text for each in found.checked] == ["4"]


def test_what_no_sandbox_takes_is_refused_at_once() -> None:
    async def work(pool: SandboxPool) -> None:
        for name in ("../out", "/etc/passwd", "", "a//b", "main.py", ".stdin", "a/./b"):
            with pytest.raises(UserError, match="no name for a file"):
                await pool.run("", files={name: b""})
        with pytest.raises(UserError, match="more than a sandbox takes"):
            await pool.run("", stdin=bytes(LIMITS.input_bytes + 1))
        with pytest.raises(UserError, match="timeout_s is 0"):
            await pool.run("", timeout_s=0)

    in_pool(work, size=1)


def test_nothing_is_left_after_a_pool_and_a_cancelled_run_is_killed() -> None:
    seen: set[int] = set()
    gc.collect()  # what earlier tests left to be closed
    before = Counter(open_files().values())

    async def work(pool: SandboxPool) -> int:
        keeper = pool._process.pid
        assert bool(groups(keeper)) == pool.in_force.memory.startswith("cgroup")
        runs = [asyncio.ensure_future(pool.run(MARKED)) for _ in range(3)]
        await until(lambda: len(marked(keeper)) == 2)
        running = marked(keeper)
        seen.update(watch.tree(keeper))
        for each in runs:
            each.cancel()
        await asyncio.wait(runs, timeout=DEADLINE_S)
        assert all(each.cancelled() for each in runs)
        assert ended(running, DEADLINE_S)  # others wait in their place
        assert (await pool.run("print(1)")).stdout == "1\n"
        seen.update(watch.tree(keeper))
        return keeper

    keeper = in_pool(work)
    assert ended(seen, 0.0)
    assert groups(keeper) == []
    end = time.monotonic() + DEADLINE_S
    while new := Counter(open_files().values()) - before:  # other tests' threads may have something open for a moment
        assert time.monotonic() < end, new
        time.sleep(0.05)


def test_runs_under_way_end_with_their_pool() -> None:
    async def run() -> None:
        pool = SandboxPool(LIMITS, 1)
        with pytest.raises(MegarlError, match="was not started"):
            await pool.run("")
        await pool.start()
        runs = [asyncio.ensure_future(pool.run(SLEEP)) for _ in range(2)]
        await asyncio.sleep(0)
        await pool.close()
        for each in runs:
            with pytest.raises(MegarlError, match="pool is closed"):
                await each

    asyncio.run(run())


OWNER = """
import asyncio, sys
from megarl.sandbox import watch
from megarl.sandbox.pool import SandboxPool
async def main():
    async with SandboxPool(size=2) as pool:
        runs = [asyncio.ensure_future(pool.run("import time; time.sleep(600)")) for _ in range(2)]
        while len(list(watch.tree(pool._process.pid))) < 5:
            await asyncio.sleep(0.05)
        print(pool._process.pid, flush=True)
        await asyncio.wait(runs)
asyncio.run(main())
"""


@pytest.mark.parametrize("struck", ["owner", "keeper"])
def test_a_killed_owner_or_keeper_leaves_nothing(struck: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as owner:
        keeper = int(owner.stdout.readline())
        processes = set(watch.tree(keeper))
        assert len(processes) >= 5
        os.kill(owner.pid if struck == "owner" else keeper, signal.SIGKILL)
        said = owner.communicate(timeout=DEADLINE_S)[1]
    assert ended(processes, DEADLINE_S)
    if struck == "keeper":
        assert "the keeper of the sandboxes ended: signal SIGKILL" in said
        in_pool(lambda pool: pool.run(""))  # the next pool removes the empty groups that it left
    assert groups(keeper) == []


def test_a_keeper_that_ends_is_told_of() -> None:
    async def work(pool: SandboxPool) -> None:
        run = asyncio.ensure_future(pool.run(SLEEP))
        await asyncio.sleep(0)
        pool._process.kill()
        with pytest.raises(WorkerDiedError, match="ended: signal SIGKILL"):
            await run
        with pytest.raises(WorkerDiedError):
            await pool.run("")

    in_pool(work, size=1)
    in_pool(lambda pool: pool.run(""))


def test_a_waiting_sandbox_that_somebody_killed_is_replaced() -> None:
    async def work(pool: SandboxPool) -> str:
        keeper = pool._process.pid
        await until(lambda: len(list(watch.tree(keeper))) == 4)
        [waiting] = watch.children(keeper)
        os.kill(waiting, signal.SIGKILL)
        await until(lambda: waiting not in watch.children(keeper))  # the keeper knows
        return (await pool.run("print('anew')")).stdout

    assert in_pool(work, size=1) == "anew\n"


class Waits:
    def __init__(self) -> None:
        self.exited = asyncio.get_running_loop().create_future()


class Flaky(Keeper):
    """Its sandboxes do not start while it is broken; they do nothing but wait."""

    broken = True

    async def _start(self) -> Any:
        if self.broken:
            raise StartError("no memory")
        cell: Any = Waits()
        self._cells.add(cell)
        return cell


def test_starts_that_fail_are_told_to_jobs_that_wait_and_to_none_that_come_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megarl.sandbox.keeper.AGAIN_S", 0.001)

    async def go() -> None:
        flaky = Flaky(None, None, 2, None)  # type: ignore[arg-type]
        flaky._stock()
        with pytest.raises(StartError, match="no memory"):
            await flaky._take()
        await until(lambda: flaky._failures > 20)
        flaky.broken = False
        await until(lambda: len(flaky._cells) == 2)
        assert {await flaky._take(), await flaky._take()} == flaky._cells

    asyncio.run(go())


def refused(command: list[str], environment: dict[str, str]) -> str:
    code = (
        "import asyncio\nfrom megarl.core.errors import UserError\nfrom megarl.sandbox.pool import SandboxPool\n"
        "try: asyncio.run(SandboxPool().start())\nexcept UserError as error: print(error)"
    )
    began = time.monotonic()
    done = subprocess.run(
        [*command, sys.executable, "-c", code],
        cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    assert time.monotonic() - began < DEADLINE_S
    return done.stdout


def test_a_machine_without_bubblewrap_says_what_to_install() -> None:
    assert "apt install bubblewrap" in refused([], {"PATH": "/nowhere"})


def test_a_kernel_that_forbids_namespaces_says_what_to_set() -> None:
    """In a user namespace that may have no further ones, which leaves the machine's own setting alone."""
    shell = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"'
    said = refused(["unshare", "--user", "--map-root-user", "sh", "-c", shell], {})
    assert "this machine makes no sandbox: bwrap: " in said
    assert "`sysctl -w user.max_user_namespaces=15000`" in said
