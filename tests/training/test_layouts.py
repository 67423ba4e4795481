"""Two processes give what one gives: log-probs, losses, weights, and steps resumed across layouts."""

import numpy as np
import pytest
import torch

from megarl.core.layout import Layout
from tests.training import torch_loop
from tests.training.harness import actor_spec, weights
from tests.training.two_ranks import LONG, VOCAB_SIZES, run, train

pytestmark = pytest.mark.slow
LAYOUTS = ["tp2", "tp1"]


@pytest.fixture(scope="module")
def paths(folder, tmp_path_factory):
    """Of the HF model, and of what the layouts write."""
    target = tmp_path_factory.mktemp("layouts")
    for name in ("single", "tp2", "tp1"):
        (target / name).mkdir()
    return folder, target


@pytest.fixture(scope="module")
def single(rank, paths):
    """One process, which is TP=1 and DP=1."""
    folder, target = paths
    return run(rank, Layout(), folder, target / "single", None)


@pytest.fixture(scope="module")
def pair(rank, ranks, single, paths):
    """Two processes: first TP=2, then DP=2. Results by rank."""
    folder, target = paths
    words = (rank.free_port(), folder, target)
    assert ranks.run("tests.training.two_ranks", 2, *words, log=target / "ranks.log") == ""
    return [torch.load(target / f"rank{index}.pt", weights_only=False) for index in range(2)]


def test_tensor_parallel_logprobs_equal_transformers(pair, folder, bounds):
    with torch.no_grad():
        model = torch_loop.load(folder)
        expected = torch.cat([torch_loop.scores(model, example, torch_loop.TEMPERATURE)[0] for example in LONG])
    lead, other = (result["tp2"]["logprobs"] for result in pair)
    assert np.abs(lead[0][0] - expected.numpy()).max() < bounds.logprob
    assert other is None


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_scores_and_gradients_of_a_split_vocabulary(pair, single, vocab_size):
    whole, parts = single["sharded"][vocab_size], [result["tp2"]["sharded"][vocab_size] for result in pair]
    for part in parts:
        torch.testing.assert_close(part["logprobs"], whole["logprobs"], atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(part["entropy"], whole["entropy"], atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(part["top"], whole["top"], atol=1e-5, rtol=1e-6)
        assert torch.equal(part["ids"], whole["ids"])
    grad = torch.cat([part["grad"] for part in parts], dim=1)
    torch.testing.assert_close(grad, whole["grad"], atol=1e-5, rtol=1e-5)
    assert not grad[:, vocab_size:].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_losses_are_those_of_one_process(pair, single, layout, bounds):
    for step, expected in enumerate(single["metrics"]):
        for result in pair:
            assert result[layout]["metrics"][step] == pytest.approx(expected, rel=bounds.loss, abs=1e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_are_those_of_one_process_where_each_has_the_whole_optimizer(pair, single, layout, bounds):
    assert single["whole"][0]["actor/grad_share_max"] > 0.1
    for result in pair:
        for step, expected in enumerate(single["whole"]):
            assert result[layout]["whole"][step] == pytest.approx(expected, rel=bounds.loss, abs=1e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_weights_are_those_of_one_process(pair, single, layout, bounds):
    trained = pair[0][layout]["weights"]
    assert trained.keys() == single["weights"].keys()
    assert max((trained[name] - tensor).abs().max() for name, tensor in single["weights"].items()) < bounds.weight


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_process_checkpoint_resumes_on_two(pair, single, layout, bounds):
    [resumed] = pair[0][layout]["resumed"]
    assert resumed == pytest.approx(single["metrics"][2], rel=bounds.loss, abs=1e-7)
    trained = pair[0][layout]["resumed_weights"]
    assert max((trained[name] - tensor).abs().max() for name, tensor in single["weights"].items()) < bounds.weight


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_process_checkpoint_resumes_on_one(pair, single, rank, paths, layout, bounds):
    folder, target = paths
    rank.build("actor", actor_spec(folder))
    rank.load("actor", target / layout)
    [resumed] = train(rank, [2])
    assert resumed == pytest.approx(single["metrics"][2], rel=bounds.loss, abs=1e-7)
    trained = weights(rank, "actor")
    assert max((trained[name] - tensor).abs().max() for name, tensor in single["weights"].items()) < bounds.weight
