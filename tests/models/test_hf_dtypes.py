"""Which parameters have to be float32 so that every tensor of a folder comes back in its own dtype."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.layout import Layout
from megarl.models.config import ModelConfig, Moe
from megarl.models.hf_dtypes import NAMES, stored_dtypes, tensor_dtypes, wide_parameters
from megarl.models.hf_files import TensorInfo
from megarl.models.rules import LayerSpec, expected_tensors, rules
from tests.models.configs import PLAIN, cases

EXPERTS = replace(PLAIN, moe=Moe(num_experts=2, top_k=1, ffn_hidden_size=2, score_bias=True), moe_layers=frozenset({1}))
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def index_of(config: ModelConfig, dtype: str, **others: str) -> dict[str, TensorInfo]:
    """A folder's index; `others` by the end of the name."""
    found = {}
    for name, shape in expected_tensors(config).items():
        own = [each for end, each in others.items() if name.endswith(end.replace("__", "."))]
        found[name] = TensorInfo(shape, own[0] if own else dtype, Path("x"), 0)
    return found


@pytest.mark.parametrize(("stored", "model"), [("F32", "float32"), ("BF16", "bfloat16"), ("F8_E4M3", "bfloat16")])
def test_a_folder_of_one_dtype_is_a_model_of_it(stored: str, model: str) -> None:
    found = stored_dtypes(index_of(PLAIN, stored), PLAIN)
    assert found is not None
    assert (found.model, found.others) == (model, {})


def test_the_bias_that_is_float32_in_every_model_is_nothing_out_of_the_way() -> None:
    found = stored_dtypes(index_of(EXPERTS, "BF16", e_score_correction_bias="F32"), EXPERTS)
    assert found is not None
    assert (found.model, found.others) == ("bfloat16", {})
    assert tensor_dtypes(EXPERTS, found.model, found.others)[BIAS] == "float32"


def test_a_bias_in_bfloat16_comes_back_in_it() -> None:
    found = stored_dtypes(index_of(EXPERTS, "BF16"), EXPERTS)
    assert found is not None
    assert found.others == {BIAS: "bfloat16"}
    assert wide_parameters(EXPERTS, "torch", found.model, found.others) == frozenset(), "Megatron's is float32 anyway"


def test_half_precision_is_exact_in_float32_alone() -> None:
    found = stored_dtypes(index_of(PLAIN, "F16"), PLAIN)
    assert found is not None
    assert found.model == "float32"
    assert set(found.others.values()) == {"float16"}
    assert set(found.others) == set(expected_tensors(PLAIN))


def test_double_precision_has_no_exact_place() -> None:
    assert stored_dtypes(index_of(PLAIN, "F32", model__norm__weight="F64"), PLAIN) is None


def test_layers_and_experts_are_alike() -> None:
    """Megatron's checkpoints hold those of all layers as one tensor."""
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    wide = wide_parameters(replace(EXPERTS, moe_layers=frozenset({0, 1})), "torch", "bfloat16", {name: "float32"})
    assert wide == {
        f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight"
        for layer in (0, 1)
        for expert in (0, 1)
    }


def test_both_copies_of_tied_embeddings_are_wide() -> None:
    tied = replace(PLAIN, tied_embeddings=True)
    wide = wide_parameters(tied, "torch", "bfloat16", {"model.embed_tokens.weight": "float32"})
    assert wide == {"embedding.word_embeddings.weight", "output_layer.weight"}


@given(case=cases(), spec=st.sampled_from(["torch", "transformer_engine"]), data=st.data())
@settings(max_examples=50, deadline=None)
def test_every_tensor_fits_into_its_parameter(
    case: tuple[ModelConfig, Layout], spec: LayerSpec, data: st.DataObject
) -> None:
    config, _ = case
    names = expected_tensors(config)
    own = {name: data.draw(st.sampled_from(sorted(NAMES))) for name in names}
    found = stored_dtypes({name: TensorInfo(shape, own[name], Path("x"), 0) for name, shape in names.items()}, config)
    assert found is not None
    assert tensor_dtypes(config, found.model, found.others) == {name: NAMES[own[name]] for name in names}
    wide = wide_parameters(config, spec, found.model, found.others)
    for rule in rules(config, spec, has_head_copy=True):
        held = "float32" if rule.is_buffer or rule.megatron in wide else found.model
        for source in rule.sources:
            assert held in ("float32", NAMES[own[source.name]]), (rule.megatron, source.name)
