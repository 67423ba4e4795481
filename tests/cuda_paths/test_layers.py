"""CUDA's layers without a device: Megatron's Transformer Engine wrappers on the pinned version's names and signatures.

The ranks are other processes' (fake_ranks.py); what they found is looked at here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import setuptools

from megarl.models.config import ModelConfig
from megarl.placement.devices import DEVICES
from megarl.placement.memory import Role, role_bytes
from megarl.placement.space import one_layout
from tests.cuda_paths.fake_ranks import (
    FAMILIES,
    KINDS_OF_LAYERS,
    SEEING,
    SEEING_WAYS,
    TORCHS,
    WITH_EXPERTS,
    cases,
    read_in,
    ways,
)
from tests.support.large import TORCH_ALONE
from tests.support.package_source import ROOT, PackageSource

DEADLINE_S = 300.0
TRANSFORMER_ENGINE = ("transformer-engine", "transformer_engine")
# What megarl itself reads of Transformer Engine's modules: weights (models/rules), and how a linear is cut (models/lora).
ATTRIBUTES = {
    "Linear": ("weight", "parallel_mode"),
    "LayerNormLinear": ("weight", "layer_norm_weight", "parallel_mode"),
    "GroupedLinear": ("weight", "num_gemms"),
}
# Other roundings choose other experts for some tokens; in which family they do is up to the CPU.
BFLOAT16_EXPERTS = tuple(f"{family}: bfloat16" for family in WITH_EXPERTS)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """By kind of layers: what was built, and what ran."""
    PackageSource(*TRANSFORMER_ENGINE)  # says what to do where it is not there
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.cuda_paths.fake_ranks"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def planned_bytes(config: ModelConfig, layout: Any, device: str) -> float:
    """Of the weights of the fullest rank."""
    role = Role(trained=True, head=config.head != "score")
    kernels = DEVICES[device].kernels
    return float(role_bytes(config, one_layout(layout, 4096, "full"), 2, role, kernels).weights[0])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "spec"), [("fused", "transformer_engine"), ("torch", "torch")])
def test_every_role_of_a_recipe_is_built_and_each_parameter_has_its_rule(
    kind: str, spec: str, found: dict[str, Any]
) -> None:
    built = found[kind]["built"]
    assert {name: each["problem"] for name, each in built.items() if each["problem"]} == {}
    assert set(built) == {name for name, _, _ in cases()} and len(built) >= 5
    otherwise = {name: each["specs"] for name, each in built.items() if each["specs"] != [spec]}
    assert otherwise == ({family: ["torch"] for family in TORCH_ALONE} if kind == "fused" else {})


@pytest.mark.slow
def test_the_plan_knows_how_many_bytes_of_weights_they_hold(found: dict[str, Any]) -> None:
    for name, config, layout in cases():
        text = replace(config, vision=None)  # a tower is not of Megatron's layers
        planned, held = planned_bytes(text, layout, "H100"), found["fused"]["built"][name]["bytes"]
        assert held == pytest.approx(planned, rel=0.01), name


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_both_kinds_of_layers_compute_and_learn_the_same(family: str, found: dict[str, Any]) -> None:
    for way, settings in ways(family).items():
        name = f"{family}: {way}"
        each = found["fused"]["ran"][name]
        assert each["problem"] is None, each["problem"]
        assert each["specs"] == ["torch", "transformer_engine"]
        rounded = settings.get("dtype") == "bfloat16"
        first, second = each["norms"]
        assert second == pytest.approx(first, rel=0.05 if rounded else 1e-6), name
        if name not in BFLOAT16_EXPERTS:
            assert each["difference"] < (0.03 if rounded else 1e-5) and each["size"] > 1, name


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SEEING)
def test_both_kinds_of_layers_see_the_same(architecture: str, found: dict[str, Any]) -> None:
    for way in SEEING_WAYS:
        each = found["fused"]["ran"][f"{architecture}: {way}"]
        assert each["problem"] is None, each["problem"]
        assert each["specs"] == ["torch", "transformer_engine"]
        assert each["norms"][1] == pytest.approx(each["norms"][0], rel=1e-6)
        assert each["difference"] < 1e-5 and each["size"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS_OF_LAYERS)
def test_layers_of_transformer_engine_may_have_torchs_attention(family: str, found: dict[str, Any]) -> None:
    each = found["fused"]["ran"][f"{family}: {TORCHS}"]
    assert each["problem"] is None, each["problem"]
    assert each["specs"] == ["torch", "transformer_engine"]
    assert each["difference"] < 1e-5 and each["read"] < 1e-5 and each["size"] > 1
    assert each["norms"][1] == pytest.approx(each["norms"][0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_each_kind_of_layers_reads_the_checkpoints_of_the_other(family: str, found: dict[str, Any]) -> None:
    assert len(read_in(family)) == (2 if family in KINDS_OF_LAYERS else 1)
    for way in read_in(family):
        assert found["fused"]["ran"][f"{family}: {way}"]["read"] < 1e-5, way


@pytest.mark.slow
def test_megatron_finds_what_it_looks_for(found: dict[str, Any]) -> None:
    used = {name.rpartition(".")[2] for name in found["fused"]["used"]}
    assert used >= {
        *("Linear", "LayerNormLinear", "GroupedLinear", "RMSNorm", "DotProductAttention"),
        *("apply_rotary_pos_emb", "FusedAdam", "multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale"),
        *("moe_permute_with_probs", "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs", "moe_unpermute"),
    }


@pytest.mark.parametrize("module", ATTRIBUTES)
def test_modules_hold_what_megarl_reads_of_them(module: str) -> None:
    source = PackageSource(*TRANSFORMER_ENGINE)
    definition = source.find("transformer_engine.pytorch", module)
    assert definition is not None
    assert [name for name in ATTRIBUTES[module] if not source.mentions(definition, name)] == []
    assert not source.mentions(definition, "no_such_name")


def test_what_is_read_is_what_a_gpu_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **settings: given.update(settings))
    exec((ROOT / "setup.py").read_text(), {"__name__": "setup"})
    version = PackageSource(*TRANSFORMER_ENGINE).version
    assert f"transformer-engine[core_cu13,pytorch]=={version}" in given["extras_require"]["gpu"]


def test_a_source_that_is_not_there_says_what_brings_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("tests.support.package_source.FOLDER", tmp_path)
    with pytest.raises(RuntimeError, match="Run `make setup`"):
        PackageSource(*TRANSFORMER_ENGINE)
