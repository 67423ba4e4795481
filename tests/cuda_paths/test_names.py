"""What megarl's own code for CUDA calls of torch and SGLang, held against their stubs and source.

The torch of this machine has neither CUDA nor NCCL.
"""

from __future__ import annotations

import ast
import inspect
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.multiprocessing import reductions

import megarl
from megarl.sync.device_segment import DEVICE

STUBS = Path(torch.__file__).parent / "_C"
PACKAGE = Path(megarl.__file__).parent


def cuda_names() -> set[str]:
    """Every `torch.cuda.NAME` that megarl reads; the adapter for CPUs sets some instead."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda":
                found.add(node.attr)
    return found - {"__dict__"}


def class_in(stub: str, *path: str) -> ast.ClassDef:
    """A class of torch's stubs, by its name and those of the classes around it."""
    body: list[ast.stmt] = ast.parse((STUBS / stub).read_text()).body
    for name in path:
        [found] = [node for node in body if isinstance(node, ast.ClassDef) and node.name == name]
        body = found.body
    return found


def members(node: ast.ClassDef) -> set[str]:
    """Names of methods, properties and fields."""
    fields = {
        part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    return fields | {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.ClassDef)}


def parameters(node: ast.ClassDef, method: str) -> list[str]:
    """Of a method, without `self`."""
    [found] = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == method]
    return [each.arg for each in found.args.args[1:]]


def test_torch_cuda_has_every_name() -> None:
    names = cuda_names()
    assert {"synchronize", "empty_cache", "max_memory_allocated", "get_device_properties"} <= names
    assert [name for name in names if not hasattr(torch.cuda, name)] == []


def test_a_group_for_sending_over_nccl_is_made_as_the_stub_says() -> None:
    nccl = class_in("_distributed_c10d.pyi", "ProcessGroupNCCL")
    assert parameters(nccl, "__init__") == ["store", "rank", "size", "options"]
    assert parameters(class_in("_distributed_c10d.pyi", "ProcessGroupNCCL", "Options"), "__init__") == [
        "is_high_priority_stream"
    ]
    assert "_timeout" in members(class_in("_distributed_c10d.pyi", "Backend", "Options"))


def test_a_device_says_its_uuid() -> None:
    assert {"uuid", "total_memory"} <= members(class_in("__init__.pyi", "_CudaDeviceProperties"))


def test_the_device_is_where_torch_and_sglang_have_it() -> None:
    assert list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)[DEVICE] == "storage_device"
    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations is not None
    source = (Path(spec.submodule_search_locations[0]) / "srt" / "utils" / "patch_torch.py").read_text()
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    assert values["_REDUCE_TENSOR_ARG_DEVICE_INDEX"] == DEVICE


def test_the_calls_that_the_stubs_are_read_for_are_there() -> None:
    tree = ast.parse((PACKAGE / "sync" / "group.py").read_text())
    calls = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert {"dist.ProcessGroupNCCL(store, rank, world_size, options)", "dist.ProcessGroupNCCL.Options()"} <= calls
