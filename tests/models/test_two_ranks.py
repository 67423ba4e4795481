"""A model cut over two processes is the model: its logits, its weights, its attention."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.models.hf_config import load_model_config
from megarl.rollout.process import free_port
from tests.models.parity import transformers_logprobs
from tests.models.test_attention import by_hand
from tests.models.two_ranks import CASES, CHUNK, SEQUENCES, attention_inputs, held_by
from tests.support.tiny import write_tiny_qwen

pytestmark = pytest.mark.slow
Pair = list[dict[str, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HF folder for each case."""
    root = tmp_path_factory.mktemp("two_ranks")
    for name, (family, overrides) in CASES.items():
        write_tiny_qwen(root / name, family, **overrides)
    return root


@pytest.fixture(scope="module")
def pair(root: Path) -> Pair:
    """Results of the two processes, by rank."""
    port = str(free_port())
    command = [sys.executable, "-m", "tests.models.two_ranks"]
    processes = [
        subprocess.Popen([*command, str(rank), port, str(root)], stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]
    errors = []
    for process in processes:
        try:
            errors.append(process.communicate(timeout=180)[1])
        finally:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return [torch.load(root / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_tensor_parallel_logprobs_equal_transformers(name: str, pair: Pair, root: Path) -> None:
    config = load_model_config(root / name)
    logits = torch.cat([result["tp"][name] for result in pair], dim=-1)
    assert logits.shape[-1] == config.padded_vocab_size(2)
    ours = logits[:, : config.vocab_size].log_softmax(-1)
    assert (ours - transformers_logprobs(root / name, config.vocab_size)).abs().max().item() < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_export_from_two_ranks_gives_back_every_bit(name: str, pair: Pair, root: Path) -> None:
    expected = load_file(root / name / "model.safetensors")
    found = load_file(root / f"{name}-exported" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def whole() -> dict[str, Any]:
    """Attention over each sequence in one process, by the formula, and its gradients."""
    *tensors, bounds = attention_inputs()
    query, key, value = (tensor.requires_grad_() for tensor in tensors[:3])
    lengths = bounds.diff().tolist()
    output = torch.cat([by_hand(*part) for part in zip(*(t.split(lengths) for t in (query, key, value)), strict=True)])
    (output * tensors[3].flatten(1)).sum().backward()
    return {"output": output.detach(), "query": query.grad, "key": key.grad, "value": value.grad}


@pytest.mark.parametrize("what", ["output", "query", "key", "value"])
def test_context_parallel_attention_and_its_gradients_are_those_of_one_process(what: str, pair: Pair) -> None:
    expected = whole()[what]
    for rank, result in enumerate(pair):
        torch.testing.assert_close(result["cp"][what], expected[held_by(rank)])


def test_context_parallel_attention_over_one_dense_sequence(pair: Pair) -> None:
    expected = whole()["output"]
    for rank, result in enumerate(pair):
        torch.testing.assert_close(result["cp"]["dense"], expected[held_by(rank)[: 2 * CHUNK * SEQUENCES[0]]])
