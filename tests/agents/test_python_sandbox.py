"""The tool `python` of a recipe: programs run in real sandboxes, and a keeper that dies is started anew."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from megarl.agents import python_sandbox
from megarl.agents.python_sandbox import ToolSandboxes, check_sandboxes
from megarl.agents.tool_sources import open_toolbox
from megarl.agents.tools import Result, ToolCall
from megarl.core.errors import UserError
from megarl.recipe.agent import Agent
from megarl.sandbox.python_tool import PythonTool
from tests.support.processes import ended


def agent(timeout_s: float = 30.0) -> Agent:
    return Agent(tools=("python",), tool_parser="qwen25", tool_timeout_s=timeout_s)


def program(code: str) -> ToolCall:
    return ToolCall("python", json.dumps({"code": code}), "c00000000")


def test_programs_run_in_sandboxes_that_begin_with_the_first_and_begin_again() -> None:
    async def go() -> list[list[Result]]:
        toolbox = open_toolbox(agent())
        [sandboxes] = toolbox._held
        assert isinstance(sandboxes, ToolSandboxes) and sandboxes._pool is None
        try:
            first = await toolbox.call(
                [program("print(6 * 7)"), program("import socket, os; print(os.getuid()); 1 / 0")]
            )
            keeper = sandboxes._pool._pid()  # type: ignore[union-attr]
            hanging = asyncio.ensure_future(toolbox.call([program("while True: pass")]))
            await asyncio.sleep(0)
            await toolbox.call([program("")])  # by now the one before runs
            os.kill(keeper, signal.SIGKILL)  # type: ignore[arg-type]
            second = await hanging
            return [first, second, await toolbox.call([program("print('again')")])]
        finally:
            await toolbox.close()
            assert ended([keeper])  # type: ignore[list-item]

    [(answer, error), (died,), (again,)] = asyncio.run(go())
    assert (answer.failed, answer.message["content"]) == (False, "42")
    assert "ZeroDivisionError" in error.message["content"]
    assert died.failed and "the keeper of the sandboxes ended" in died.message["content"]
    assert (again.failed, again.message["content"]) == (False, "again")


def test_a_program_has_the_seconds_of_a_call() -> None:
    async def go() -> list[Result]:
        toolbox = open_toolbox(agent(timeout_s=3.0))
        try:
            await toolbox.call([program("")])
            return await toolbox.call([program("print('so far', flush=True)\nwhile True: pass")])
        finally:
            await toolbox.close()

    [result] = asyncio.run(go())
    assert (
        result.message["content"].startswith("so far\n[ended: it ") and result.message["content"].endswith("seconds]")
    ) or (result.message["content"] == "so far\n[ended: it ran for longer than 3 s]")


def test_seconds_in_which_a_program_waits_for_a_sandbox_are_not_its_own() -> None:
    """Nor those in which the first ones start."""
    programs = [program("import time; time.sleep(1.6); print('done')")] * 5 * len(os.sched_getaffinity(0))

    async def go() -> list[Result]:
        toolbox = open_toolbox(agent(timeout_s=6.0))
        try:
            return await toolbox.call(programs)
        finally:
            await toolbox.close()

    results = asyncio.run(go())
    assert {result.message["content"] for result in results} == {"done"}


def test_what_the_model_is_told_of_it() -> None:
    [schema] = open_toolbox(agent()).schemas
    assert schema["function"]["name"] == "python"
    assert schema["function"]["description"].startswith("Run a Python program, and return what it prints.")
    assert schema["function"]["parameters"]["required"] == ["code"]


def test_a_machine_without_sandboxes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoPool:
        def __init__(self, *_: object, **__: object) -> None:
            raise UserError("there is no bubblewrap here")

    monkeypatch.setattr(python_sandbox, "SandboxPool", NoPool)
    with pytest.raises(UserError, match=r"agent\.tools: python: there is no bubblewrap here"):
        check_sandboxes(1.0, "agent.tools: python")


def test_a_function_of_that_name_would_be_another_tool() -> None:
    assert PythonTool.python.__name__ == "python"
    with pytest.raises(UserError, match="two tools have the name 'python'"):
        open_toolbox(agent().model_copy(update={"tools": ("python", "tests.agents.test_python_sandbox:python")}))


def python(code: str) -> str:
    """Not the one of megarl."""
    return code
