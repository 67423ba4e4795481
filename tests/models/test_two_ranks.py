"""A model cut over two processes is the model: its logits and its attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.core.ports import free_port
from megarl.models.hf_config import load_model_config
from tests.models.parity import transformers_logprobs
from tests.models.test_attention import by_hand
from tests.models.two_ranks import CASES, CHUNK, SEQUENCES, attention_inputs, held_by
from tests.support.forked_ranks import Ranks
from tests.support.tiny import write_tiny_model
from tests.support.tolerances import Tolerance

pytestmark = pytest.mark.slow
Pair = list[dict[str, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HF folder for each case."""
    root = tmp_path_factory.mktemp("two_ranks")
    for name, (family, overrides, _) in CASES.items():
        write_tiny_model(root / name, family, **overrides)
    return root


@pytest.fixture(scope="module")
def pair(root: Path, ranks: Ranks) -> Pair:
    """Results of the two processes, by rank."""
    assert ranks.run("tests.models.two_ranks", 2, 2, free_port(), root, log=root / "ranks.log") == ""
    return [torch.load(root / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_logprobs_of_a_cut_model_equal_transformers(name: str, pair: Pair, root: Path, bounds: Tolerance) -> None:
    config, tp = load_model_config(root / name), CASES[name][2].tp
    parts = [result["logits"][name] for result in pair]
    logits = torch.cat(parts, dim=-1) if tp == 2 else parts[0]
    assert logits.shape[-1] == config.padded_vocab_size(tp)
    ours = logits[:, : config.vocab_size].log_softmax(-1)
    assert (ours - transformers_logprobs(root / name, config.vocab_size)).abs().max().item() < bounds.logprob
    assert tp == 2 or torch.equal(*parts)


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
