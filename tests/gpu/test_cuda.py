"""What only a GPU can show: its memory is counted, and Megarl's model on it says what transformers says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.core.platform import Platform, get_platform, held_bytes, peak_bytes, reset_peak_bytes, return_free_memory
from megarl.training.rank import Rank
from megarl.training.spec import RoleSpec
from tests.support.tiny import write_tiny_model
from tests.training import torch_loop
from tests.training.samples import examples, shards

pytestmark = pytest.mark.gpu

MIB = 2**20
TOLERANCE = 0.1  # nats; bfloat16


@pytest.fixture
def cuda() -> Platform:
    return get_platform("cuda")


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    write_tiny_model(tmp_path / "model", "qwen3", head_dim=64)
    made = Rank(0, 1, "cuda", seed=1)
    made.rendezvous("127.0.0.1", made.free_port(), timeout_s=60)
    yield made
    made.close()


def test_memory_of_the_device_is_counted(cuda: Platform) -> None:
    reset_peak_bytes(cuda)
    before = held_bytes(cuda)
    block = torch.zeros(64 * MIB, dtype=torch.uint8, device=cuda.device)
    assert held_bytes(cuda) - before >= 64 * MIB
    del block
    return_free_memory(cuda)
    assert held_bytes(cuda) == before
    assert peak_bytes(cuda) - before >= 64 * MIB


def test_logprobs_equal_transformers(rank: Rank, tmp_path: Path) -> None:
    rank.build("reference", RoleSpec(tmp_path / "model", "bfloat16", torch_loop.TEMPERATURE))
    made = examples([9, 33, 17], 128)
    [shard], _ = shards([made])
    column = rank.logprobs("reference", shard)
    assert column is not None
    reference = torch_loop.load(tmp_path / "model")
    with torch.no_grad():
        expected = torch.cat([torch_loop.scores(reference, each, torch_loop.TEMPERATURE)[0] for each in made])
    torch.testing.assert_close(torch.tensor(column[0][0]), expected, atol=TOLERANCE, rtol=0)
