"""Flags of CUDA's servers, settled by SGLang's own code for every recipe of a real model, as on a node of 8 H100; and for models
of families without a recipe.

All of it but the devices is real: parser, model configs, defaults by model and machine, and the checks that come last before a
server's processes start (tests/support/sglang_fake_devices.py).
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import megarl
from megarl.core.errors import UserError
from megarl.core.platform import CPU_ENV, CUDA_ENV, CUDA_SHARED, SETTING_SHARED, get_platform
from megarl.models.config import ModelConfig
from megarl.models.fp8_weights import check_servable
from megarl.models.known_configs import known_config
from megarl.models.layout_check import cuts_servers
from megarl.models.lora_served import FAMILIES, served_lora
from megarl.models.lora_settings import LoraSettings
from megarl.placement.cluster import make_cluster
from megarl.placement.server_share import chosen_share
from megarl.placement.states import StatePool
from megarl.placement.workload import FRACTION_FLAG, read_model
from megarl.recipe.load import load_recipe
from megarl.run.server_spec import server_spec
from megarl.run.servers_check import SEPARATE_EXPERTS
from megarl.serving.server import ServerSpec, Span
from megarl.serving.server_flags import SPARE_TOKENS
from tests.support.large import SIZES as LARGE
from tests.support.large import write_large

CUDA = get_platform("cuda")
RECIPES = Path(megarl.__file__).parent.parent / "recipes"
RECIPE_NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml") if not path.stem.startswith("quickstart"))
NAMES = [*RECIPE_NAMES, *LARGE]
SHARES = {"shares_devices": True}
SLEEPS = {**SHARES, "offloaded": True}
ONE_OF_FOUR = {"span": Span(4, 1, "10.0.0.1:29000"), "tp": 32}


@dataclass(frozen=True)
class Asked:
    """A server as megarl may make it. differs: from the recipe's own. settled: what has to come of it."""

    differs: dict[str, Any]
    settled: dict[str, Any]


# By what makes them: a recipe's own keys, or flags that rollout.server_args may have.
FORMS = {
    "apart": Asked({}, {"device": "cuda", "enable_memory_saver": False, "attention_backend": "fa3"}),
    "shared devices": Asked(SHARES, {"mem_fraction_static": 0.3}),
    "offloaded": Asked(SLEEPS, {"mem_fraction_static": 0.3, "enable_memory_saver": True}),
    "a share of the plan's": Asked(
        {**SLEEPS, "extra": ("--mem-fraction-static", "0.55")}, {"mem_fraction_static": 0.55}
    ),
    "kv tokens": Asked({"kv_tokens": 65536}, {"max_total_tokens": 65536 + SPARE_TOKENS}),
    "deterministic": Asked(
        {"deterministic": True}, {"enable_deterministic_inference": True, "disable_radix_cache": False}
    ),
    "four nodes": Asked(ONE_OF_FOUR, {"nnodes": 4, "node_rank": 1, "tp_size": 32}),
    "experts cut by expert": Asked({"tp": 4, "extra": ("--ep-size", "4")}, {"ep_size": 4}),
    "data-parallel attention": Asked({"tp": 4, "extra": ("--dp-size", "2", "--enable-dp-attention")}, {"dp_size": 2}),
    "weights by their hashes": Asked({"extra": (SEPARATE_EXPERTS,)}, {"disable_shared_experts_fusion": True}),
    "routing": Asked({"extra": ("--enable-return-routed-experts",)}, {"enable_return_routed_experts": True}),
} | {
    f"deterministic on {backend}": Asked(
        {"deterministic": True, "extra": ("--attention-backend", backend)}, {"attention_backend": backend}
    )
    for backend in CUDA.deterministic_attention
}
FORMS |= {f"with {flag}": Asked({"extra": (flag,)}, {}) for flag in SETTING_SHARED}
# Of models without a recipe, what their layers may have to do with.
OF_LARGE = ("apart", "shared devices", "offloaded", "kv tokens", *(form for form in FORMS if "deterministic" in form))
# What comes of the layers themselves: kernels for windows; states in as many copies as the plan counts (placement/states.py).
SETTLED = {
    "exaone4": {"attention_backend": "triton"},
    "gemma4": {"attention_backend": "triton"},
    "qwen3_5": {
        "mamba_radix_cache_strategy": "extra_buffer",
        "mamba_full_memory_ratio": StatePool().over_cache,
        "disable_overlap_schedule": False,
        "max_mamba_cache_size": None,
    },
}
FP8 = Asked({**SLEEPS, "quantized": True}, {"load_format": "dummy", "enable_memory_saver": True})
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a flag that is none": ({"extra": ("--no-such-flag",)}, "SystemExit"),
    "an attention that is not deterministic": (
        {"deterministic": True, "extra": ("--attention-backend", "torch_native")},
        "attention backends are supported for deterministic inference",
    ),
    "longer than the model's context": ({"context_length": 10**6}, "context_length"),
    "more copies than ranks": ({"tp": 1, "extra": ("--dp-size", "2", "--enable-dp-attention")}, "AssertionError"),
}


@functools.cache
def large_folders() -> tempfile.TemporaryDirectory[str]:
    """What holds the config.json of models without a recipe, as long as this process lives."""
    made = tempfile.TemporaryDirectory()
    for family in LARGE:
        write_large(Path(made.name) / family, family)
    return made


@functools.cache
def own_spec(name: str) -> ServerSpec:
    """What the recipe's own servers would be told on devices of their own, of a model that is known by its config.json."""
    if name in LARGE:
        folder = Path(large_folders().name) / name
        tp = 2 if cuts_servers(read_model(folder), 2) else 1
        return replace(own_spec(RECIPE_NAMES[0]), model=folder, tp=tp, context_length=2048)
    recipe = load_recipe(RECIPES / f"{name}.yaml").recipe
    config = known_config(recipe.model.path)
    assert config is not None, recipe.model.path
    spec = server_spec(recipe)
    extra = tuple(word for word in spec.extra if word not in (FRACTION_FLAG, _share(spec)))
    return replace(spec, model=config.parent, offloaded=False, extra=extra)


def _share(spec: ServerSpec) -> str | None:
    """Of a device's memory, where the recipe says it."""
    return spec.extra[spec.extra.index(FRACTION_FLAG) + 1] if FRACTION_FLAG in spec.extra else None


def on_ranks_devices(name: str) -> Asked | None:
    """What a recipe's own servers are told where they take turns with its ranks; None where they do not."""
    if name in LARGE:
        return None
    spec = server_spec(load_recipe(RECIPES / f"{name}.yaml").recipe)
    share = _share(spec)
    assert spec.offloaded == (share is not None), "else they take 0.3 of it, and the ranks sleep meanwhile"
    if share is None:
        return None
    asked = {**SLEEPS, "extra": spec.extra}
    return Asked(asked, {"mem_fraction_static": float(share), "enable_memory_saver": True})


@functools.cache
def forms(name: str) -> dict[str, Asked]:
    """All that megarl may make of the recipe's servers."""
    model = read_model(own_spec(name).model)
    made = dict(FORMS) if name not in LARGE else {form: FORMS[form] for form in OF_LARGE}
    if (own := on_ranks_devices(name)) is not None:
        made["its own"] = own
    if serves_fp8(model, own_spec(name).tp):
        made["fp8"] = FP8
        made["fp8, deterministic"] = replace(FP8, differs={**FP8.differs, "deterministic": True})
    if model.family in FAMILIES:
        lora = served_lora(model, LoraSettings(16, 32, ("linear_qkv", "linear_proj")))
        made["adapters"] = Asked({**SLEEPS, "lora": lora}, {"enable_lora": True, "max_lora_rank": 16})
    return made


def serves_fp8(model: ModelConfig, tp: int) -> bool:
    """Whether a run lets servers hold the model in FP8; else it is refused long before SGLang is asked."""
    try:
        check_servable(model, tp)
    except UserError:
        return False
    return True


def refusal(name: str, form: str) -> str | None:
    """What SGLang 0.5.21 says where a model cannot have an attention: fa4 has latents on Blackwell alone, and no EXAONE; neither
    it nor fa3 has Gemma 4."""
    if name == "gemma4" and form.endswith((" on fa3", " on fa4")):
        return "Gemma4 only supports"
    model = read_model(own_spec(name).model)
    if not form.endswith("on fa4"):
        return None
    return "requires SM100" if model.mla is not None else "is required for Exaone4" if name == "exaone4" else None


def settled(kind: str, words: dict[str, list[str]]) -> dict[str, Any]:
    """What SGLang makes of servers' words on such devices."""
    told = subprocess.run(
        [sys.executable, "-m", "tests.support.sglang_fake_devices", kind],
        # A run in this process sets the CPU's; a server starts with the device's.
        env={name: value for name, value in os.environ.items() if name not in CPU_ENV} | CUDA_ENV,
        input=json.dumps(words),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-3000:]
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """What SGLang says of everything that is asked here: it is loaded once."""
    asked: dict[str, ServerSpec] = {}
    for name in NAMES:
        own = own_spec(name)
        asked |= {f"{name} {form}": replace(own, **each.differs) for form, each in forms(name).items()}
    assert {form for name in NAMES for form in forms(name)} >= {"fp8", "fp8, deterministic", "adapters", "its own"}
    asked |= {what: replace(own_spec(NAMES[0]), **differs) for what, (differs, _) in REFUSED.items()}
    return settled("H100", {name: spec.words(CUDA, "127.0.0.1", 30000) for name, spec in asked.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_sglang_takes_every_form_of_a_recipes_servers(name: str, answers: dict[str, Any]) -> None:
    problems, otherwise = {}, {}
    for form, each in forms(name).items():
        answer = answers[f"{name} {form}"]
        if (refused := refusal(name, form)) is not None:
            assert refused in answer["problem"]
            continue
        if answer["problem"] is not None:
            problems[form] = answer["problem"]
            continue
        settled = each.settled | SETTLED.get(name, {}) if form == "apart" else each.settled
        found = {key: answer["settled"][key] for key in settled}
        if found != settled:
            otherwise[form] = (found, settled)
    assert problems == {} and otherwise == {}


@pytest.mark.slow
def test_a_server_has_the_nccl_that_the_ranks_have_or_is_not_reached_by_it(answers: dict[str, Any]) -> None:
    """Both are in the group that weights are broadcast in, where one side's settings have to be the other's."""
    fixed = {f"NCCL_{bound}_NCHANNELS" for bound in ("MIN", "MAX")}
    for name, form in ((each, form) for each in NAMES for form in forms(each) if refusal(each, form) is None):
        nccl = answers[f"{name} {form}"]["nccl"]
        # What a flag sets to 1 is refused where the ranks do not have the same (recipe/sync_rules).
        expected = {key: CUDA.env[key] for key in CUDA_SHARED}
        expected |= dict.fromkeys(SETTING_SHARED.get(form.removeprefix("with "), ()), "1")
        assert {key: nccl[key] for key in CUDA_SHARED} == expected, form
        several = replace(own_spec(name), **forms(name)[form].differs).tp > 1 and "deterministic" in form
        assert (fixed <= nccl.keys()) == several, form  # weights go to those through the host: run/sending.py


@pytest.mark.slow
def test_a_server_has_as_many_queues_as_sglang_wants_and_not_the_ranks_one(answers: dict[str, Any]) -> None:
    """What it starts with is the ranks' environment: SGLang sets this before it starts its own processes."""
    assert CUDA.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    found = {answers[f"{name} apart"]["nccl"]["CUDA_DEVICE_MAX_CONNECTIONS"] for name in NAMES}
    assert found == {"8"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_has_the_share_that_a_server_takes_which_is_told_none(name: str, answers: dict[str, Any]) -> None:
    cluster, apart = make_cluster("H100", 1), own_spec(name)
    found, planned = {}, {}
    for form in ("apart", "kv tokens", "four nodes", "deterministic"):
        if form in forms(name):
            spec = replace(apart, **forms(name)[form].differs)
            tokens = None if spec.kv_tokens is None else spec.kv_tokens + SPARE_TOKENS
            found[form] = answers[f"{name} {form}"]["settled"]["mem_fraction_static"]
            model = read_model(spec.model)
            planned[form] = chosen_share(model, spec.tp, cluster, spec.max_running_requests, tokens)
    assert planned == pytest.approx(found, abs=0.002)


@pytest.mark.slow
@pytest.mark.parametrize("what", REFUSED)
def test_what_sglang_refuses_is_refused_there_too(what: str, answers: dict[str, Any]) -> None:
    _, expected = REFUSED[what]
    assert answers[what]["problem"] is not None and expected in answers[what]["problem"]


@pytest.mark.slow
def test_a_deterministic_server_without_words_of_its_own_has_a_backend_that_the_platform_names(
    answers: dict[str, Any],
) -> None:
    chosen = {name: answers[f"{name} deterministic"]["settled"]["attention_backend"] for name in NAMES}
    assert set(chosen.values()) <= set(CUDA.deterministic_attention)
