"""Megarl's models against transformers', on random checkpoints that transformers wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.core.platform import get_platform
from megarl.models.bootstrap import prepare_megatron
from megarl.models.hf_config import load_model_config
from tests.support.tiny import write_tiny_qwen

prepare_megatron(get_platform("cpu"))

from megarl.models.gpt import build_gpt, packed_params  # noqa: E402
from megarl.models.hf_weights import export_buckets, load_hf_weights, save_hf  # noqa: E402
from megarl.rollout.process import free_port  # noqa: E402
from megarl.training.layout import Layout  # noqa: E402
from megarl.training.parallel import close_parallel, init_parallel  # noqa: E402

CASES = [
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 32, "num_key_value_heads": 1}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("llama", {"rope_theta": 5000.0}),
]


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    init_parallel(0, Layout(), get_platform("cpu"), "127.0.0.1", free_port(), timeout_s=60, seed=1)
    yield
    close_parallel()


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_packed_logits_equal_transformers(family: str, overrides: dict[str, object], tmp_path: Path) -> None:
    write_tiny_qwen(tmp_path, family, tokenizer=True, **overrides)
    config = load_model_config(tmp_path)
    model = build_gpt(config, tp=1, dtype=torch.float32, platform=get_platform("cpu")).eval()
    load_hf_weights(model, config, tmp_path, 0, 1)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    lengths = [7, 1, 33, 20]
    tokens = torch.randint(0, 128, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        ours = model(tokens[None], positions[None], None, packed_seq_params=packed_params(bounds))[0]
        theirs = torch.cat([reference(part[None]).logits[0] for part in tokens.split(lengths)])
    difference = (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max().item()
    assert difference < 1e-5


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_export_gives_back_every_bit(family: str, overrides: dict[str, object], tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_tiny_qwen(source, family, tokenizer=True, **overrides)
    config = load_model_config(source)
    model = build_gpt(config, tp=1, dtype=torch.float32, platform=get_platform("cpu"))
    load_hf_weights(model, config, source, 0, 1)
    save_hf(export_buckets(model, config, None, 1 << 14), config, source, target, max_shard_bytes=1 << 17)
    expected = load_file(source / "model.safetensors")
    found = {name: tensor for path in target.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert len(list(target.glob("*.safetensors"))) > 1
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    AutoModelForCausalLM.from_pretrained(target)
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
