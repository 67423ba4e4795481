"""Keeps torch's compiler out of a CPU server until something is compiled: to load it takes a second of a core.

transformers and SGLang do no more with it, as they load, than to say of dozens of functions how it should treat them, or that it
is to compile them. What is said here is kept, and told to the compiler before it first compiles.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
TRACING = f"{COMPILER}._trace_wrapped_higher_order_op"  # transformers takes a class of it


class LateCompiler:
    """Answers in the compiler's place; whatever it does not know, the compiler itself answers, which is loaded then."""

    def __init__(self) -> None:
        self._allowed: list[Any] = []

    def allow_in_graph(self, function: Any) -> Any:
        """As of torch.compiler: told to the compiler later."""
        self._allowed.append(function)
        return function

    def assume_constant_result(self, function: Any) -> Any:
        """As of torch.compiler: a mark on the function."""
        function._dynamo_marked_constant = True
        return function

    def disable(self, function: Any = None, recursive: bool = True, **_: Any) -> Any:
        """As of torch.compiler: a function that leaves the compiler out, and loads it when it is first called for that."""
        if function is None:
            return functools.partial(self.disable, recursive=recursive)
        late: Any = importlib.import_module("torch._compile")
        return late._disable_dynamo(function, recursive)

    def tell(self) -> None:
        """Load the compiler, and tell it what was said."""
        compiler: Any = importlib.import_module(COMPILER)
        while self._allowed:
            compiler.allow_in_graph(self._allowed.pop())

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(COMPILER), name)


class _LateTracing(ModuleType):
    """The one class is the real one as soon as one is made of it; another name means that the compiler is loading."""

    class TransformGetItemToIndex:
        def __new__(cls, *values: Any, **options: Any) -> Any:
            return importlib.import_module(TRACING).TransformGetItemToIndex(*values, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(TRACING) is self:
            del sys.modules[TRACING]
        return getattr(importlib.import_module(TRACING), name)


@contextmanager
def without_compiler() -> Iterator[None]:
    """What is imported within talks to the compiler as if it were there. It is loaded when something is compiled.

    `torch.compile` stays late afterwards.
    """
    torch: Any = importlib.import_module("torch")
    late = LateCompiler()
    compile_late(late.tell)
    if COMPILER in sys.modules:
        yield
        return
    said = ("allow_in_graph", "assume_constant_result", "disable")
    before = {name: getattr(torch.compiler, name) for name in said}
    for name in said:
        setattr(torch.compiler, name, getattr(late, name))
    torch._dynamo = late  # `import torch._dynamo` puts the real one here
    tracing = sys.modules[TRACING] = _LateTracing(TRACING)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(torch.compiler, name, function)
        if vars(torch).get("_dynamo") is late:
            del torch._dynamo
        if sys.modules.get(TRACING) is tracing:
            del sys.modules[TRACING]


def compile_late(prepare: Callable[[], None]) -> None:
    """Have functions that torch is to compile compiled when they are first called. prepare: called before one is."""
    torch: Any = importlib.import_module("torch")
    compile_ = torch.compile

    def at_once(model: Any, **options: Any) -> Any:
        prepare()
        return compile_(model, **options)

    def late(model: Callable[..., Any] | None = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(late, **options)
        if isinstance(model, torch.nn.Module):
            return at_once(model, **options)
        compiled: list[Callable[..., Any]] = []

        @functools.wraps(model)
        def call(*values: Any, **named: Any) -> Any:
            if not compiled:
                compiled.append(at_once(model, **options))
            return compiled[0](*values, **named)

        return call

    torch.compile = late
