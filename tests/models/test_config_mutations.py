"""No config.json raises anything but UserError: every key of every family that is there, or read, against every wrong value."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.models.config import ModelConfig
from megarl.models.families import FAMILIES
from megarl.models.gpt import build_gpt
from megarl.models.hf_config import parse_model_config
from megarl.models.rope import attention_factor, inverse_frequencies, magnitude
from megarl.models.rules import expected_tensors
from megarl.training.parallel import Groups
from tests.models.parity import megatron_logits
from tests.models.test_families import ARCHITECTURES, DEEPSEEK, GEMMA
from tests.models.test_hf_config import FP8, QWEN3
from tests.support.platforms import chosen
from tests.support.tiny import CONFIGS, tiny_config

PATH = Path("model/config.json")
MODEL = TypeAdapter(ModelConfig)
DESCRIBED: set[str] = set()  # models, as they are written: most values that are accepted change none
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
SCORE = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "SCORE"}, "label2id": {"SCORE": 0}}
SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention"] + ["full_attention"] * 27,
}
WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 7, 2**31, 2**63, 10**30, 10**400, 0.0, 0.5, 1.0, -1.5, 1e300, 1e-300),
    *(
        math.nan,
        math.inf,
        -math.inf,
        "",
        "x",
        "3",
        "full_attention",
        [],
        [1],
        [-1],
        [True],
        ["x"],
        [None],
        [[]],
        [1, "x"],
    ),
    *({}, {"x": 1}, {"0": "x"}, [{}], ["full_attention"], ["Qwen3ForCausalLM", 5], {"rope_type": "yarn"}),
)


def tiny(family: str) -> dict[str, Any]:
    """What transformers writes."""
    raw: dict[str, Any] = json.loads(json.dumps(tiny_config(family).to_dict()))
    return raw | {"architectures": [ARCHITECTURES[family]]}


BASES: dict[str, dict[str, Any]] = {
    **{family: tiny(family) for family in CONFIGS},
    "published qwen3": QWEN3,
    "published gemma": GEMMA,
    # Of fewer layers and experts: its tensors are named at each value.
    "published deepseek": DEEPSEEK | {"quantization_config": FP8, "num_hidden_layers": 4, "n_routed_experts": 16},
    "llama3": tiny("llama") | {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": LLAMA3},
    "score": QWEN3 | SCORE,
    "sliding": QWEN3 | SLIDING,
}


@dataclass(frozen=True)
class Asked(Mapping[str, Any]):
    """A config that remembers, by their paths, the keys which are asked for."""

    raw: Mapping[str, Any]
    asked: set[tuple[str, ...]]
    path: tuple[str, ...] = field(default=())

    def __getitem__(self, key: str) -> Any:
        self.asked.add((*self.path, key))
        value = self.raw[key]
        return Asked(value, self.asked, (*self.path, key)) if isinstance(value, dict) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)


def keys(raw: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Every key that is there, and every key that is read."""
    asked: set[tuple[str, ...]] = set()
    parse_model_config(Asked(raw, asked), PATH)
    there = {(key,) for key in raw} | {(key, part) for key in raw if isinstance(raw[key], dict) for part in raw[key]}
    return sorted(there | asked)


def changed(raw: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = path
    inner = raw.get(first)
    return {**raw, first: changed(inner if isinstance(inner, dict) else {}, tuple(rest), value) if rest else value}


def check(raw: Mapping[str, Any]) -> bool:
    """Parse it: what is refused is one paragraph; what is accepted is a model that can be described. True if accepted."""
    try:
        config = parse_model_config(raw, PATH)
    except UserError as error:
        text = str(error)
        assert "\n" not in text
        assert str(PATH) in text
        assert len(text) < 1500
        return False
    if (text := repr(config)) not in DESCRIBED:
        describe(config)
        DESCRIBED.add(text)
    return True


def describe(config: ModelConfig) -> None:
    MODEL.validate_json(json.dumps(asdict(config), default=sorted), strict=True)
    assert hash(config) is not None
    assert expected_tensors(config)
    for rope in filter(None, (config.rope, config.local_rope)):
        if config.rotated < 2**20:
            assert inverse_frequencies(rope, config.rotated).isfinite().all()
        assert attention_factor(rope) > 0
        assert magnitude(rope.factor, rope.mscale_all_dim or 0.0) > 0


@pytest.mark.parametrize("base", BASES)
def test_a_wrong_value_anywhere_is_refused_or_harmless(base: str) -> None:
    raw = BASES[base]
    assert check(raw)
    refused = sum(not check(changed(raw, key, value)) for key in keys(raw) for value in WRONG)
    assert refused > 200, "values that no key accepts"


def test_every_family_is_among_them() -> None:
    assert set(CONFIGS) == {family.name for family in FAMILIES.values()}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=6,
)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_several_random_values_are_refused_or_harmless(data: st.DataObject) -> None:
    raw = BASES[data.draw(st.sampled_from(sorted(BASES)))]
    for key in data.draw(st.lists(st.sampled_from(keys(raw)), max_size=3)):
        raw = changed(raw, key, data.draw(JSON | st.sampled_from(WRONG)))
    check(raw)


@given(data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_accepted_can_be_built_and_run(one_rank: Groups, data: st.DataObject) -> None:
    """Sizes, heads, windows and experts that nobody tried: refused here, or a model whose logits are numbers."""
    raw = tiny(data.draw(st.sampled_from(sorted(CONFIGS))))
    for key in data.draw(st.lists(st.sampled_from(keys(raw)), min_size=1, max_size=2)):
        if key[0] not in ("vocab_size", "num_hidden_layers"):
            raw = changed(raw, key, data.draw(st.sampled_from([1, 2, 3, 5, 6, 8, 16, 40, 0.5, 2.0, True, False, None])))
    try:
        config = parse_model_config(raw, PATH)
    except UserError:
        return
    [model] = build_gpt(config, Layout(), one_rank.collection, dtype=torch.float32, platform=chosen())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
        assert megatron_logits(model.eval(), config.vocab_size).isfinite().all()


@pytest.mark.parametrize("family", CONFIGS)
def test_a_key_that_is_gone_is_refused_or_harmless(family: str) -> None:
    raw = tiny(family)
    for gone in raw:
        check({key: value for key, value in raw.items() if key != gone})
