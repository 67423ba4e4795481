"""Runs the unmodified megatron-core 0.16.1 on CPU and gloo. The one adapter of that kind; never used where CUDA is.

`install` gives the modules of megatron.core, and nobody else, a `torch` of their own, in which
  - `torch.cuda` answers for the CPU: device, streams, events, random state, synchronisation;
  - factory functions take device="cuda" as the CPU;
  - `torch.distributed.all_to_all_single` takes split sizes given as tensors (the MoE dispatcher leaves them on the CPU);
  - `torch.distributed.all_gather` and `reduce_scatter` take parts of different lengths, as NCCL does and gloo does not
    (the MoE dispatcher under expert-tensor parallel);
  - `torch.norm` adds up long tensors piece by piece: on CPUs torch's own loses more with each element, 0.2% of the norm of
    30 million and 1% of that of 100 million, by which gradients would be clipped.
Gradients and parameters of a data-parallel group of one rank do not go through gloo: it would copy them in threads of its own,
each with OpenMP threads of its own, and where a process has more of these than cores, libgomp lets them sleep at each pause
(`GOMP_SPINCOUNT`): a step of one rank on two cores takes 1.3 times as long.
Rotary positions are computed in fewer passes over memory (cpu_rope.py).
The real torch gets three changes only: Tensor.cuda returns the tensor (it could only raise here); Tensor.type answers
`torch.cuda.FloatTensor` to Megatron's optimizers, which accept nothing else, and the truth to everybody else; and torch's
optimizers do without torch's compiler, which they load otherwise to have it leave them alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megarl.core.errors import MegarlError
from megarl.core.stand_in import standing_in
from megarl.models import cpu_rope
from megarl.models.megatron_torch_adam import check_version

CPU = torch.device("cpu")
PIECE = 1 << 16  # elements that torch's own norm adds up to 1e-6 of it
MARK = "_megarl_cpu"

# Importing these loads every module of megatron.core that megarl uses.
MODULES = (
    "parallel_state",
    "tensor_parallel",
    "pipeline_parallel",
    "distributed",
    "optimizer",
    "optimizer_param_scheduler",
    "dist_checkpointing",
    "dist_checkpointing.strategies.torch",
    "dist_checkpointing.strategies.fully_parallel",
    "models.gpt",
    "models.gpt.gpt_layer_specs",
    "transformer.moe.moe_layer",
    "utils",
)
FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "linspace"),
    *("rand", "randn", "randint", "empty_like", "zeros_like", "ones_like", "full_like"),
)


class Stream:
    """Work on a CPU is done when the call returns: there is one stream, and nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, *_: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always done."""
        return True

    def record_event(self, *_: Any) -> Event:
        """An event that has happened."""
        return Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    __hash__ = object.__hash__


class Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None:
        """Has happened."""

    def wait(self, *_: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always done."""
        return True

    def elapsed_time(self, _: Event) -> float:
        """Milliseconds; not measured."""
        return 0.0


def install() -> None:
    """Adapt Megatron to this process; repeatable. Call it before megatron is imported elsewhere.

    Raises MegarlError where CUDA is available, and for another version of megatron-core.
    """
    if torch.cuda.is_available():
        raise MegarlError("The CPU adapter for Megatron must not be used where CUDA is available.")
    if hasattr(torch.Tensor, MARK):
        return
    check_version("megatron_cpu.py")
    _import_without_compiling()
    namespace = _torch_namespace()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = namespace  # type: ignore[attr-defined]
    _spare_compiler()
    _adapt_random_states()
    _adapt_buffers()
    _adapt_tensor()
    cpu_rope.install(sys.modules["megatron.core.models.common.embeddings.rope_utils"])


def _import_without_compiling() -> None:
    """Megatron's @jit_fuser is torch.compile, which on a CPU is slow and wants a C++ compiler."""
    compile_ = torch.compile
    torch.compile = lambda model=None, *_, **__: model or _unchanged  # type: ignore[assignment]
    try:
        # DTensor is what Megatron's FSDP and torch's own checkpoints tell apart from other tensors: no rank here has any, and
        # it comes with sympy, a fifth of what a rank loads.
        with standing_in(("torch.distributed.tensor", "torch.distributed._tensor")):
            for name in MODULES:
                importlib.import_module(f"megatron.core.{name}")
    finally:
        torch.compile = compile_


def _spare_compiler() -> None:
    """torch loads its compiler, a second of a core, when an optimizer is first used: to have it leave the optimizer alone.

    Of most methods it keeps what the compiler made of them, which is the method itself here; `step` comes without gradients.
    """
    for method in vars(torch.optim.Optimizer).values():
        if (plain := getattr(method, "__wrapped__", None)) is not None:
            plain.__dynamo_disable = plain
    kinds: tuple[Any, ...] = (torch.optim.Adam, torch.optim.SGD)
    for kind in kinds:
        kind.step = torch.no_grad()(kind.step.__wrapped__)


def _adapt_random_states() -> None:
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[attr-defined]
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # type: ignore[attr-defined]


def _adapt_buffers() -> None:
    buffers = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(buffers, name, _between_several(getattr(buffers, name)))


def _between_several(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(output: torch.Tensor, input: torch.Tensor, *, group: Any, **options: Any) -> Any:
        if group.size() > 1:
            return collective(output, input, group=group, **options)
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return None

    return call


def _adapt_tensor() -> None:
    tensor_type = torch.Tensor.type

    def type_for_optimizers(self: torch.Tensor, dtype: Any = None, *values: Any, **options: Any) -> Any:
        if dtype is not None:
            return tensor_type(self, dtype, *values, **options)
        name: str = tensor_type(self)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return name.replace("torch.", "torch.cuda.", 1) if caller.startswith("megatron.core.optimizer") else name

    torch.Tensor.type = type_for_optimizers  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    setattr(torch.Tensor, MARK, True)


def _torch_namespace() -> ModuleType:
    namespace = ModuleType("torch")
    namespace.__dict__.update(torch.__dict__)
    namespace.__getattr__ = lambda name: getattr(torch, name)  # type: ignore[method-assign]
    for name in FACTORIES:
        setattr(namespace, name, _on_cpu(getattr(torch, name)))
    namespace.norm = _norm  # type: ignore[attr-defined]
    namespace.cuda = _cuda_namespace()  # type: ignore[attr-defined]
    namespace.distributed = _distributed_namespace()  # type: ignore[attr-defined]
    return namespace


def _norm(tensor: torch.Tensor, *order: Any, **options: Any) -> torch.Tensor:
    if order or options or tensor.numel() <= PIECE:
        norm: torch.Tensor = torch.norm(tensor, *order, **options)
    else:
        norm = torch.norm(torch.stack(torch._foreach_norm(tensor.flatten().split(PIECE))))
    return norm


def _cuda_namespace() -> ModuleType:
    cuda: Any = ModuleType("torch.cuda")
    cuda.__dict__.update(torch.cuda.__dict__)
    for name in ("synchronize", "empty_cache", "set_device", "ipc_collect", "reset_peak_memory_stats"):
        setattr(cuda, name, _nothing)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.current_device = lambda: CPU
    cuda.device_count = lambda: 1
    cuda.Stream, cuda.Event = Stream, Event
    cuda.current_stream = cuda.default_stream = lambda *_, **__: Stream()
    cuda.stream = cuda.device = lambda *_, **__: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.nvtx = SimpleNamespace(
        range_push=_nothing, range_pop=_nothing, range=lambda *_, **__: contextlib.nullcontext()
    )
    return cuda  # type: ignore[no-any-return]


def _distributed_namespace() -> ModuleType:
    namespace: Any = ModuleType("torch.distributed")
    namespace.__dict__.update(dist.__dict__)

    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **options: Any
    ) -> Any:
        return dist.all_to_all_single(
            output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), **options
        )

    namespace.all_to_all_single = all_to_all_single
    namespace.all_gather, namespace.reduce_scatter = _all_gather, _reduce_scatter
    return namespace  # type: ignore[no-any-return]


def _all_gather(parts: list[torch.Tensor], mine: torch.Tensor, group: Any = None, **options: Any) -> Any:
    """`parts`, which may differ in their first dimension, from all ranks: sent in the length of the longest."""
    longest = max(parts, key=len)
    if all(len(part) == len(longest) for part in parts):
        return dist.all_gather(parts, mine, group=group, **options)
    padded = longest.new_zeros(longest.shape)
    padded[: len(mine)] = mine
    received = [torch.empty_like(longest) for _ in parts]
    dist.all_gather(received, padded, group=group)
    for part, whole in zip(parts, received, strict=True):
        part.copy_(whole[: len(part)])
    return None


def _reduce_scatter(output: torch.Tensor, parts: list[torch.Tensor], group: Any = None, **options: Any) -> Any:
    """The sum over all ranks of this rank's part; parts may differ in their first dimension."""
    if all(len(part) == len(output) for part in parts):
        return dist.reduce_scatter(output, parts, group=group, **options)
    total = torch.cat(parts)
    dist.all_reduce(total, group=group)
    output.copy_(total.split([len(part) for part in parts])[dist.get_rank(group)])
    return None


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*values: Any, **options: Any) -> Any:
        device = options.get("device")
        if (isinstance(device, str) and device.startswith("cuda")) or (
            isinstance(device, torch.device) and device.type == "cuda"
        ):
            options["device"] = CPU
        if "pin_memory" in options:
            options["pin_memory"] = False
        return factory(*values, **options)

    return make


def _nothing(*_: Any, **__: Any) -> None:
    """A CUDA call without an effect on a CPU."""


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
