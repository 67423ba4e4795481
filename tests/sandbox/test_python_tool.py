from __future__ import annotations

import asyncio
import inspect

from megarl.sandbox.job import Limits, Result
from megarl.sandbox.pool import SandboxPool
from megarl.sandbox.python_tool import PythonTool, shortened, told


def test_a_program_is_run_and_told_of() -> None:
    async def run() -> list[str]:
        async with SandboxPool(Limits(timeout_s=20), size=2) as pool:
            tool = PythonTool(pool, most_characters=300)
            codes = ("print(6 * 7)", "1 / 0", "x = 1", "print('a' * 1000)", "import sys; sys.exit(4)")
            return await asyncio.gather(*map(tool.python, codes))

    plain, error, nothing, long, code = asyncio.run(run())
    assert plain == "42"
    assert error.endswith("ZeroDivisionError: division by zero")
    assert nothing == "[nothing was printed]"
    assert long == "a" * 150 + "\n[700 characters left out]\n" + "a" * 150
    assert code == "[exit code 4]"


def test_how_it_ended_is_said() -> None:
    late = Result("timeout", "so far\n", "", None, None, 1.0, "it ran for longer than 1 s")
    assert told(late) == "so far\n[ended: it ran for longer than 1 s]"
    assert told(Result("error", "", "", None, "SIGSEGV", 1.0)) == "[ended by SIGSEGV]"
    assert shortened("abcdef", 6) == "abcdef"


def test_a_schema_can_be_made_of_it() -> None:
    signature = inspect.signature(PythonTool.python, eval_str=True)
    assert [(name, each.annotation) for name, each in signature.parameters.items() if name != "self"] == [("code", str)]
    assert signature.return_annotation is str and "code: The program." in (PythonTool.python.__doc__ or "")
