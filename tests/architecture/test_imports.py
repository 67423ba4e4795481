"""Holds the direction of the arrows of docs/architecture.md, and what else can be told from syntax alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, imports, modules, room_of

# A room may import itself and the rooms above it. The files beside the rooms are rooms of one module.
ROOMS = (
    "core",
    "sandbox",
    "algorithms",
    "recipe",
    "hub",
    "data",
    "rewards",
    "models",
    "placement",
    "training",
    "serving",
    "rollout",
    "agents",
    "sync",
    "profiling",
    "convert",
    "cluster",
    "report",
    "train",
    "sft",
    "run",
    "launch",
    "commands",
    "command_line",
    "cli",
    "__main__",
)
# What a room may not import although it stands below: the loops know nobody but the nouns and their recipe.
LOOPS = {"train": {"core", "recipe"}, "sft": {"core", "recipe", "train"}}
OWNERS = {"ray": {"cluster", "launch"}, "megatron": {"models", "training"}}
SGLANG_MODULES = {
    "megarl.serving.launcher",
    "megarl.serving.sglang_cpu",
    "megarl.serving.sglang_cpu_attention",
    "megarl.serving.sglang_cpu_layers",
    "megarl.serving.sglang_cpu_linear",
    "megarl.serving.sglang_cpu_kernels",
    "megarl.serving.sglang_flags",
    "megarl.serving.sglang_router",
    "megarl.serving.sglang_server",
}
# The platform itself, and the adapter that answers Megatron's own questions about CUDA.
PLATFORM_MODULES = {"megarl.core.platform", "megarl.models.megatron_cpu"}
WITHOUT_TORCH = (
    "core",
    "sandbox",
    "recipe",
    "hub",
    "placement",
    "data",
    "rewards",
    "train",
    "sft",
    "agents",
    "run",
    "launch",
    "commands",
    "command_line",
    "cli",
)
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def test_every_room_is_in_the_order() -> None:
    assert {room_of(name) for name in modules()} - {""} <= set(ROOMS)


def test_rooms_import_only_rooms_above_them() -> None:
    wrong = []
    for name, tree in modules().items():
        room = room_of(name)
        for found in imports(tree):
            target = room_of(found.module) if found.module.startswith("megarl.") else ""
            if not target or target == room or target not in ROOMS or not room:
                continue
            allowed = LOOPS.get(room, set(ROOMS[: ROOMS.index(room)]))
            if target not in allowed:
                wrong.append(f"{name}:{found.line} imports {found.module}")
    assert wrong == []


def test_preflight_starts_nothing_and_so_knows_no_cluster() -> None:
    found = {each.module for each in imports(modules()["megarl.run.preflight"])}
    asked = ("megarl.training.run_checkpoints.", "megarl.serving.server_flags.")  # files on disk, and a parser
    targets = {room_of(name) for name in found if not name.startswith(asked)}
    assert not targets & {"cluster", "training", "rollout", "sync", "report"}


@pytest.mark.parametrize("library", OWNERS)
def test_engines_stay_in_their_rooms(library: str) -> None:
    wrong = [
        f"{name}:{found.line}"
        for name, tree in modules().items()
        for found in imports(tree)
        if found.module.split(".")[0] == library and room_of(name) not in OWNERS[library]
    ]
    assert wrong == []


def test_sglang_is_a_subprocess() -> None:
    engines = {"sglang", "sglang_router", "sgl_kernel"}
    users = {
        name
        for name, tree in modules().items()
        if any(found.module.split(".")[0] in engines for found in imports(tree))
    }
    assert users <= SGLANG_MODULES
    importers = {
        f"{name}:{found.line}"
        for name, tree in modules().items()
        for found in imports(tree)
        if name not in SGLANG_MODULES and any(found.module.startswith(module) for module in SGLANG_MODULES)
    }
    assert importers == set()


def test_rooms_without_torch_do_not_name_it_when_they_load() -> None:
    wrong = [
        f"{name}:{found.line}"
        for name, tree in modules().items()
        for found in imports(tree)
        if room_of(name) in WITHOUT_TORCH
        and not found.deferred
        and found.module.split(".")[0] in ("torch", "megatron", "transformers")
    ]
    assert wrong == []


def test_preflight_and_doctor_load_without_torch() -> None:
    """Also not by way of another module."""
    code = (
        "import sys, megarl.run.preflight, megarl.commands.doctor, megarl.command_line\n"
        "print(*sorted({'torch', 'megatron', 'ray', 'transformers', 'sglang'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_processes_without_tensors_load_no_torch() -> None:
    """The driver and those that ask, count and watch: each is a process that a run waits for."""
    modules = (
        "megarl.run.session",
        "megarl.cluster.coordinator",
        "megarl.cluster.collectors",
        "megarl.cluster.server_actors",
    )
    engines = "{'torch', 'megatron', 'transformers', 'sglang'}"
    code = f"import sys, {', '.join(modules)}\nprint(*sorted({engines} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_only_the_platform_asks_which_platform_it_is() -> None:
    """A comparison with the word `cpu` or `cuda` anywhere else is a branch in the wrong place."""
    wrong = []
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if name in PLATFORM_MODULES or not isinstance(node, ast.Compare):
                continue
            words = {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
            if words & {"cpu", "cuda"}:
                wrong.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []


def test_the_cpu_adapter_is_imported_in_one_place_and_late() -> None:
    users = [
        (name, found.deferred)
        for name, tree in modules().items()
        for found in imports(tree)
        if found.module.startswith("megarl.models.megatron_cpu") and name != "megarl.models.megatron_cpu"
    ]
    assert users == [("megarl.models.bootstrap", True)]


def test_files_stay_short() -> None:
    lengths = {path.relative_to(PACKAGE): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_functions_stay_short() -> None:
    long = [
        f"{name}.{node.name}: {length} lines"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_error_is_swallowed() -> None:
    """An `except` whose body is only `pass` says neither what happened nor why that is all right."""
    silent = [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and all(isinstance(each, ast.Pass) for each in node.body)
    ]
    assert silent == []


def test_every_module_says_what_it_is_for() -> None:
    assert [name for name, tree in modules().items() if not ast.get_docstring(tree)] == []


def test_the_page_names_every_module_and_no_other() -> None:
    page = (Path(PACKAGE).parent / "docs" / "architecture.md").read_text()
    rooms = re.findall(r"^megarl/(\w+)/ (.*?)(?=^megarl/|^```)", page, flags=re.MULTILINE | re.DOTALL)
    here = {name.split(".", 1)[1] for name in modules() if name.count(".") == 2}
    named = {f"{room}.{word}" for room, text in rooms for word in re.findall(r"\w+", text)}
    assert sorted(name for name in here - named if "__" not in name) == []
    lists = {f"{room}.{word}" for room, text in rooms for word in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", text)}
    assert sorted(lists - here) in ([], ["models.model_configs"])


def test_the_order_of_the_rooms_is_the_one_in_the_docs() -> None:
    lines = (Path(PACKAGE).parent / "docs" / "architecture.md").read_text().splitlines()
    documented = [line.split()[0][len("megarl/") :].rstrip("/") for line in lines if line.startswith("megarl/")]
    documented = [name.removesuffix(".py") for name in documented]
    assert [room for room in ROOMS if room in documented] == documented
