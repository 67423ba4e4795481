"""What is said to torch's compiler before it is there. That servers start without it, tests/serving/alone.py sees."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megarl.serving.sglang_cpu_compiler import compile_late


def told(code: str, *values: str) -> list[str]:
    """Lines that a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *values], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_function_is_compiled_when_it_is_called_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def at_once(function: Any, **options: object) -> Callable[[int], int]:
        compiled.append(f"{getattr(function, '__name__', type(function).__name__)} {options}")
        return lambda value: 10 * function(value)

    monkeypatch.setattr(torch, "compile", at_once)
    compile_late(lambda: compiled.append("first"))

    @torch.compile(dynamic=True)
    def more(value: int) -> int:
        return value + 1

    plain = torch.compile(more)
    assert compiled == [] and more.__name__ == "more"
    assert [more(1), more(2)] == [20, 30] and compiled == ["first", "more {'dynamic': True}"]
    assert plain(1) == 200 and torch.compile(torch.nn.Identity()) is not None
    assert compiled[2:] == ["first", "more {}", "first", "Identity {}"]


def test_what_was_said_to_the_compiler_it_hears_before_it_compiles() -> None:
    lines = told("""
import sys

import torch

from megarl.serving.sglang_cpu_compiler import without_compiler

before = torch.compiler.disable
with without_compiler():
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    @torch._dynamo.allow_in_graph
    def opaque(x):
        return x + (1 if torch.compiler.is_dynamo_compiling() else 100)

    @torch.compiler.assume_constant_result
    def constant():
        return 5

    @torch.compiler.disable(recursive=False)
    def alone(x):
        return x * 2 if torch.compiler.is_dynamo_compiling() else x * 3

    @torch.compile(backend="eager")
    def compiled(x):
        return alone(opaque(x)) + constant()

    print("torch._dynamo" in sys.modules)
print("torch._dynamo" in sys.modules, torch.compiler.disable is before, "_dynamo" in vars(torch))
print(compiled(torch.tensor(1.0)).item(), alone(torch.tensor(1.0)).item())
made = TransformGetItemToIndex()
real = sys.modules["torch._dynamo._trace_wrapped_higher_order_op"]
print(type(made) is real.TransformGetItemToIndex, hasattr(real, "trace_wrapped"), torch._dynamo is sys.modules["torch._dynamo"])
""")
    # The opaque function is put into the graph unread, and the one that is to be left alone runs outside it: (1 + 100) * 3 + 5.
    assert lines == ["False", "False True False", "308.0 3.0", "True True True"]


MORE = """
import importlib
import os
import sys

import torch

from megarl.serving.sglang_cpu_compiler import without_compiler

def ask(what):
    with without_compiler():
        torch._dynamo.allow_in_graph(len)
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
        exec(what, {"torch": torch})
        loaded = "torch._dynamo" in sys.modules
    importlib.import_module("torch._dynamo")
    real = sys.modules["torch._dynamo._trace_wrapped_higher_order_op"]
    right = torch._dynamo is sys.modules["torch._dynamo"] and hasattr(real, "trace_wrapped")
    print(loaded, right, torch.compile(lambda x: x + 1, backend="eager")(torch.tensor(1)).item(), flush=True)

for what in sys.argv[1:]:
    # Each in a process of its own, in which the compiler is not yet there.
    if not os.fork():
        ask(what)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_who_asks_for_more_than_that_has_the_compiler_at_once() -> None:
    asks = [
        "assert torch._dynamo.config.cache_size_limit > 0",
        "import torch._dynamo; from torch._dynamo.utils import counters; assert counters is not None",
        "from torch._dynamo._trace_wrapped_higher_order_op import trace_wrapped; assert trace_wrapped is not None",
    ]
    assert told(MORE, *asks) == ["True True 2"] * len(asks)
