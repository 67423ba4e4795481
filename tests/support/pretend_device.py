"""A device that is not there: tensors of the CPU that say that they are on CUDA, so that what would fail on a GPU fails here.

    python -m tests.support.pretend_device [arguments for pytest]

Runs tests with `--platform cuda` on a machine without a GPU. A tensor is on the pretended device by its storage. As on CUDA, an
operation refuses tensors of both sides, but for numbers, indices and copies; numpy takes none of the device; and collectives of
NCCL take none of the host. Memory of the device is counted. What it cannot show: kernels, their rounding, streams, and NCCL.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megarl.core.platform import get_platform

DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu")
MIXED = ("aten::copy_", "aten::set_", "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "barrier")


class Storages:
    """Those on the device, and their bytes: now, and the most since `reset`."""

    def __init__(self) -> None:
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._taken = self.peak = 0  # by the sizes that storages began with: to look at all of them each time is slow

    @property
    def now(self) -> int:
        """Bytes that live; a storage may have been resized."""
        return sum(found.nbytes() for ref in list(self._live.values()) if (found := ref()) is not None)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device; one that is spread over ranks has no storage of its own."""
        return not isinstance(tensor, ShardedTensor) and id(tensor.untyped_storage()) in self._live

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's storage is on the device from here on."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._live:
            return tensor

        def gone(_: Any) -> None:
            self._live.pop(key, None)
            self._taken -= size

        self._live[key] = weakref.ref(storage, gone)
        self._taken += size
        self.peak = max(self.peak, self._taken)
        return tensor

    def reset(self) -> None:
        """Let the peak begin again."""
        self.peak = self._taken


STORAGES, ANYWHERE = Storages(), Storages()
HOST_GROUPS: set[str] = set()


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All within lists, tuples and dicts."""
    return [each for each in tree_iter(value) if isinstance(each, torch.Tensor)]


def is_device(value: Any) -> bool | None:
    """Whether what was given as a device is the pretended one; None where it is no device."""
    if isinstance(value, str):
        return value.startswith("cuda") if value.startswith(("cuda", "cpu")) else None
    return value.type == "cuda" if isinstance(value, torch.device) and value.type != "meta" else None


def of_host(given: Any) -> bool:
    """Whether a collective's arguments name a group that was asked for gloo, among groups that are NCCL's."""
    groups = [each for each in given if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())]
    return any(dist.ProcessGroup.unbox(each).group_name in HOST_GROUPS for each in groups)


class OnOneDevice(TorchDispatchMode):
    """Refuses operations over both sides, and lets what they make be where they worked."""

    def __init__(self, asked: DeviceArguments) -> None:
        super().__init__()
        self.in_objects, self.asked = False, asked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tensors_of((args, kwargs or {}))
        there = [tensor for tensor in given if STORAGES.has(tensor)]
        name = func._schema.name
        here = [tensor for tensor in given if tensor.dim() and not STORAGES.has(tensor) and not ANYWHERE.has(tensor)]
        if name.startswith("c10d::"):
            if here and not self.in_objects and not of_host(args):
                raise RuntimeError(
                    f"No backend type associated with device type cpu ({name}: NCCL takes none of the host)"
                )
        elif there and here and name not in MIXED:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found cuda:0 and cpu: {name} of "
                f"{[(tuple(tensor.shape), STORAGES.has(tensor)) for tensor in given]}"
            )
        elif name in ("aten::index", "aten::index_put_") and not STORAGES.has(given[0]) and there:
            raise RuntimeError(
                f"indices should be either on cpu or on the same device as the indexed tensor (cpu): {name}"
            )
        result = func(*args, **(kwargs or {}))
        if there and name not in MIXED[:2]:
            for tensor in tensors_of(result):
                STORAGES.put(tensor)
        elif all(ANYWHERE.has(tensor) for tensor in given) and (given or not self.asked.depth):
            # Nobody in Python asked for it: a gradient that autograd fills up with zeros, on the side of its tensor.
            for tensor in tensors_of(result):
                ANYWHERE.put(tensor)
        return result


class DeviceArguments(TorchFunctionMode):
    """What names the device, or asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.depth += 1
        try:
            return self._call(func, args, dict(kwargs or {}))
        finally:
            self.depth -= 1

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs.pop("pin_memory", None)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._asked(func, args, kwargs)
        if func in (torch.Tensor.numpy, torch.Tensor.__array__) and STORAGES.has(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if func is torch.Tensor.cpu:
            return moved(args[0], False)
        if func is torch.Tensor.to:
            return self._to(args, kwargs)
        target = is_device(kwargs.get("device"))
        if target is None:
            return func(*args, **kwargs)
        kwargs["device"], random = HOST, kwargs.get("generator")
        if isinstance(random, Generator) and random.on_device != target:
            raise RuntimeError(
                f"Expected a generator of the device's own kind; on the device: {random.on_device}, {target}"
            )
        made = func(*args, **kwargs)
        if target and isinstance(made, torch.Tensor):
            made = moved(made, True) if tensors_of(args) else STORAGES.put(made)
        elif not target and isinstance(made, torch.Tensor):
            made = moved(made, False)
        return made

    @staticmethod
    def _asked(func: Any, args: Any, kwargs: Any) -> Any:
        found = func(*args, **kwargs)
        if isinstance(found, torch.device) and isinstance(args[0], torch.Tensor) and found.type == "cpu":
            return DEVICE if STORAGES.has(args[0]) else found
        if getattr(func, "__self__", None) in (torch.Tensor.is_cuda, torch.Tensor.is_cpu):
            return STORAGES.has(args[0]) == (func.__self__ is torch.Tensor.is_cuda)
        return found

    @staticmethod
    def _to(args: Any, kwargs: dict[str, Any]) -> Any:
        source, *rest = args
        named = [*rest, kwargs.get("device"), kwargs.get("other")]
        targets = [is_device(each) for each in named if is_device(each) is not None]
        targets += [STORAGES.has(each) for each in named if isinstance(each, torch.Tensor)]
        dtypes = [each.dtype for each in named if isinstance(each, torch.Tensor)]
        dtypes += [each for each in (*rest, kwargs.get("dtype")) if isinstance(each, torch.dtype)]
        made = source.to(dtypes[0]) if dtypes else source
        made = moved(made, targets[0]) if targets else made
        return made.clone() if kwargs.get("copy") and made is source else made


def moved(tensor: torch.Tensor, there: bool) -> torch.Tensor:
    """On the other side a copy, which autograd knows; else the tensor itself."""
    if STORAGES.has(tensor) == there:
        return tensor
    return _Moved.apply(tensor, there)  # type: ignore[no-untyped-call, no-any-return]


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, there: bool) -> torch.Tensor:
        ctx.there = there
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        if there:
            STORAGES.put(made)
        return made.copy_(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return moved(grads[0], not ctx.there), None


def pretend_platform(name: str = "auto") -> Any:
    """CUDA's, but for what runs Megatron and NCCL here."""
    from megarl.core import platform

    found = get_platform(name)  # type: ignore[arg-type]
    if found.name == "cpu":
        return found
    return replace(found, backend="gloo", has_transformer_engine=False, has_apex=False, env=platform.CPU_ENV)


class Generator(torch.Generator):
    """Random numbers of the device, which are the CPU's; `on_device` is what was asked for."""

    def __new__(cls, device: Any = HOST) -> Generator:
        return super().__new__(cls)

    def __init__(self, device: Any = HOST) -> None:
        self.on_device = bool(is_device(device))

    def manual_seed(self, seed: int) -> Generator:
        """As torch's, which gives back one of its own."""
        super().manual_seed(seed)
        return self


def install(objects: OnOneDevice) -> None:
    """Let torch and megarl believe in the device."""
    from megarl.core import platform
    from megarl.models import megatron_cpu

    platform.get_platform = pretend_platform  # type: ignore[assignment]
    platform.cuda_device_count = lambda: 1  # type: ignore[assignment]
    for name in OBJECTS:
        setattr(dist, name, _of_objects(getattr(dist, name), objects))
    dist.new_group = _noting_host(dist.new_group)  # type: ignore[assignment]
    megatron_cpu.install()
    space: Any = importlib.import_module("megatron.core.parallel_state").torch
    for name in megatron_cpu.FACTORIES:
        setattr(space, name, getattr(torch, name))
    space.cuda.current_device = lambda: DEVICE
    torch.Tensor.cuda = lambda self, *_, **__: moved(self, True)  # type: ignore[method-assign]
    # They would be one function for the modes, which are off within it: backward passes run Python, too.
    torch.autograd.has_torch_function = lambda *_: False  # type: ignore[attr-defined]
    torch.Generator = Generator  # type: ignore[misc]
    torch.Tensor.backward = _backward  # type: ignore[method-assign, assignment]
    cuda: Any = torch.cuda
    cuda.synchronize = cuda.empty_cache = cuda.ipc_collect = lambda *_: None
    cuda.memory_allocated = lambda *_: STORAGES.now
    cuda.max_memory_allocated = lambda *_: max(STORAGES.peak, STORAGES.now)
    cuda.reset_peak_memory_stats = lambda *_: STORAGES.reset()


def _backward(self: torch.Tensor, gradient: Any = None, retain_graph: Any = None, **options: Any) -> None:
    torch.autograd.backward(self, gradient, retain_graph, **options)


def _of_objects(function: Callable[..., Any], mode: OnOneDevice) -> Callable[..., Any]:
    """Objects travel as bytes, which torch puts where the backend wants them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before, mode.in_objects = mode.in_objects, True
        try:
            return function(*args, **kwargs)
        finally:
            mode.in_objects = before

    return call


def _noting_host(new_group: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        group = new_group(*args, **kwargs)
        if kwargs.get("backend") == "gloo" and isinstance(group, dist.ProcessGroup):
            HOST_GROUPS.add(group.group_name)
        return group

    return call


def also_in_threads(asked: DeviceArguments, dispatch: OnOneDevice) -> None:
    """Let what asyncio gives to threads meet the device, too: torch's modes are of one thread."""
    to_thread = asyncio.to_thread

    def with_modes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def call() -> Any:
            with asked, dispatch:
                return function(*args, **kwargs)

        return to_thread(call)

    asyncio.to_thread = with_modes  # type: ignore[assignment]


@contextmanager
def pretended() -> Iterator[None]:
    """Within the block there is a device."""
    asked = DeviceArguments()
    dispatch = OnOneDevice(asked)
    install(dispatch)
    also_in_threads(asked, dispatch)
    with asked, dispatch:
        yield


def main() -> int:
    """pytest, with the device."""
    import pytest

    os.environ["MEGARL_TEST_PLATFORM"] = "cuda"
    with pretended():
        from tests.support import platforms

        platforms.trouble = lambda _: None  # type: ignore[assignment]
        return int(pytest.main(["--platform", "cuda", *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
