"""Kernels that SGLang settles on for each family with experts on Blackwell; tests/serving/test_cuda_flags.py has Hopper."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from megarl.core.platform import get_platform
from megarl.models.families import FAMILIES
from megarl.serving.server import ServerSpec
from megarl.serving.server_models import LAID_OUT_ANEW, ROUTING
from tests.serving.test_cuda_flags import settled
from tests.support.large import write_large
from tests.support.large_vision import LARGE, write_large_vision

CUDA = get_platform("cuda")
RUNNER = "--moe-runner-backend"
ATTENTION = ("--attention-backend", "triton")  # its own choice wants a package of CUDA's
# Models with experts that see images, whose servers are neither in FP8 nor deterministic.
SEEING = {LARGE[name][0]: name for name in ("Qwen3-VL-30B-A3B", "Qwen3.5-35B-A3B")}
# What SGLang makes of experts in FP8 lies as it is sent by either.
IN_FP8 = ("auto", "triton", "flashinfer_trtllm")


def without(words: list[str]) -> list[str]:
    """A server's words without the kernels of experts."""
    at = words.index(RUNNER)
    return words[:at] + words[at + 2 :]


@functools.cache
def answers(folder: Path) -> dict[str, Any]:
    """What SGLang settles on, by architecture and form."""
    words: dict[str, list[str]] = {}
    for architecture, family in FAMILIES.items():
        if family.moe is None:
            continue
        write_large(folder / family.name, family.name)
        spec = functools.partial(ServerSpec, folder / family.name, "bfloat16", kv_tokens=2048)
        own = spec(extra=ATTENTION).words(CUDA, "127.0.0.1", 30000)
        words |= {f"{architecture} told": own, f"{architecture} untold": without(own) if RUNNER in own else own}
        words[f"{architecture} fp8"] = spec(quantized=True, extra=ATTENTION).words(CUDA, "127.0.0.1", 30000)
        words[f"{architecture} deterministic"] = spec(deterministic=True).words(CUDA, "127.0.0.1", 30000)
        words[f"{architecture} routing"] = spec(extra=(ROUTING, *ATTENTION)).words(CUDA, "127.0.0.1", 30000)
    for architecture, name in SEEING.items():
        spec = functools.partial(ServerSpec, write_large_vision(folder / name, name), "bfloat16", kv_tokens=2048)
        own = spec(extra=ATTENTION).words(CUDA, "127.0.0.1", 30000)
        words |= {f"{architecture} told": own, f"{architecture} untold": without(own)}
        words[f"{architecture} routing"] = spec(extra=(ROUTING, *ATTENTION)).words(CUDA, "127.0.0.1", 30000)
    return settled("B200", words)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Asked once."""
    return answers(tmp_path_factory.mktemp("models"))


def runners(found: dict[str, Any], form: str) -> dict[str, str]:
    """The kernels of experts of each architecture in a form."""
    return {
        name.split()[0]: each["settled"]["moe_runner_backend"] for name, each in found.items() if name.endswith(form)
    }


@pytest.mark.slow
def test_experts_lie_as_they_are_sent(found: dict[str, Any]) -> None:
    assert {name: each["problem"] for name, each in found.items() if each["problem"] is not None} == {}
    assert len(found) == 5 * sum(family.moe is not None for family in FAMILIES.values()) + 3 * len(SEEING)
    untold, told = runners(found, " untold"), runners(found, " told")
    assert {name for name, runner in untold.items() if runner.startswith("flashinfer")} == {*LAID_OUT_ANEW}
    assert {name: runner for name, runner in told.items() if runner not in ("auto", "triton")} == {}
    assert set(runners(found, " fp8").values()) <= {*IN_FP8}


@pytest.mark.slow
def test_a_server_that_is_to_tell_its_choice_of_experts_makes_it_where_it_is_kept(found: dict[str, Any]) -> None:
    assert set(runners(found, " routing").values()) == {"triton"}


@pytest.mark.slow
def test_deterministic_servers_have_an_attention_that_keeps_prefixes(found: dict[str, Any]) -> None:
    ones = [each["settled"] for name, each in found.items() if name.endswith(" deterministic")]
    assert {(each["attention_backend"], each["disable_radix_cache"]) for each in ones} == {("triton", False)}
