"""What all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from megarl.core.loading import without_collection
from megarl.core.platform import Platform
from tests.support.platforms import MAY_LACK, VARIABLE, absent_import, chosen, lacking, may_lack, trouble
from tests.support.results import Results
from tests.support.tolerances import Tolerance, tolerance

# No test asks the real hub, also not where a path that leads nowhere looks like a name on it.
os.environ["HF_HUB_OFFLINE"] = "1"

# Ray has its workers, and so ranks and servers, stand back for everybody else: beside other tests they would get nothing done.
os.environ.update(RAY_worker_niceness="0")

if TYPE_CHECKING:
    from tests.support.forked_ranks import Ranks
    from tests.support.forked_servers import Copies
    from tests.support.seeing import Seeing
    from tests.support.served import Pool

# No deadline for a single example: on a busy machine the first one, which warms caches, would fail by the clock alone.
settings.register_profile("megarl", deadline=None)
settings.load_profile("megarl")


def pytest_addoption(parser: pytest.Parser) -> None:
    default = os.environ.get(VARIABLE, "cpu")
    parser.addoption("--platform", choices=("cpu", "cuda"), default=default, help="on what the engine's tests compute")
    parser.addoption("--may-lack", action="store_true", help="skip, and say so, what a package is not there for")
    parser.addoption("--results", type=Path, help="file for what became of each test, a JSON line each")
    parser.addoption("--until", type=float, help="seconds of the epoch, after which no test begins (with --results)")


@pytest.hookimpl(tryfirst=True)  # before what other conftests prepare for the platform
def pytest_configure(config: pytest.Config) -> None:
    os.environ[VARIABLE] = config.getoption("--platform")
    if config.getoption("--may-lack"):
        os.environ[MAY_LACK] = "1"
    if wrong := trouble(chosen()):
        raise pytest.UsageError(f"--platform {chosen().name}: {wrong}")
    if chosen().has_device_memory:
        compute_exactly()
    if config.getoption("--results") is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(config.getoption("--results"), config.getoption("--until")))


def compute_exactly() -> None:
    """On a device: float32 is float32, and what is computed twice is the same twice, as the tests have it of a CPU.

    Not more than a warning where torch has no deterministic kernel: Gated DeltaNet's sums along a chunk are such. It also leaves
    the gradients of fused attention as they are, which add up in any order where a sequence has more keys than one block (64 or
    128): those of the tests that compare bits have fewer.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a machine lacks takes its own tests away, where it may lack something."""
    for mark in item.iter_markers("needs"):
        if without := lacking(chosen(), *mark.args):
            pytest.skip(without)
    if chosen().has_device_memory and any(item.iter_markers("host_only")):
        pytest.skip("is about a device that is the host itself")


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Generator[None, Any, Any]:
    """A test file that imports a package that the machine lacks is skipped as a whole, where it may lack something."""
    module = yield
    if may_lack():
        load = module._getobj

        def load_or_skip() -> Any:
            try:
                return load()
            except pytest.Collector.CollectError as error:
                if without := absent_import(error):
                    pytest.skip(without, allow_module_level=True)
                raise

        module._getobj = load_or_skip
    return module


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported for the tests stays to the end: nobody looks for garbage in it."""
    with without_collection():
        found = yield
        gc.freeze()
    return found


@pytest.fixture(scope="session")
def platform() -> Platform:
    """What the engine, and all that touches a device, runs on."""
    return chosen()


@pytest.fixture(scope="session")
def device(platform: Platform) -> str:
    """torch's name of it."""
    return platform.device


@pytest.fixture(scope="module")
def on_device(platform: Platform, device: str) -> Iterator[None]:
    """For tests of functions of tensors: what they make is on the platform's device, where nothing else is said."""
    import torch

    with torch.device(device) if platform.has_device_memory else nullcontext():
        yield


@pytest.fixture(scope="session")
def bounds(platform: Platform) -> Tolerance:
    """How far float32 may be off on the platform."""
    return tolerance(platform)


@pytest.fixture(scope="session")
def served(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """One real SGLang server with its router, for all tests that leave it as they found it."""
    from tests.support.served import NEEDS, serving

    if without := lacking(platform, *NEEDS):
        pytest.skip(without)
    with serving(tmp_path_factory.mktemp("served"), platform) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Starts several ranks, for all tests that look at what they compute."""
    from tests.support.forked_ranks import forked_ranks

    with forked_ranks() as made:
        yield made


@pytest.fixture(scope="session")
def copies() -> Iterator[Copies]:
    """Starts real SGLang servers, for all tests that ask what they hold and answer."""
    from tests.support.forked_servers import forked_servers

    with forked_servers() as made:
        yield made


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("Qwen2VLForConditionalGeneration", marks=pytest.mark.slow),
        *(f"{name}ForConditionalGeneration" for name in ("Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe")),
    ],
)
def seen(request: pytest.FixtureRequest, copies: Copies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    """A real server of a tiny model of each architecture that sees images, and transformers' model with the same weights.

    Who sends the server other weights gives them to that model first.
    """
    from tests.support.seeing import seeing

    with seeing(copies, tmp_path_factory.mktemp("seen"), request.param) as found:
        yield found
