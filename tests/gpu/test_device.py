"""What only a device with memory of its own can show: that memory is counted, and a role that sleeps gives its bytes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.core.platform import Platform, held_bytes, peak_bytes, reset_peak_bytes, return_free_memory
from megarl.training.offload import PARTS
from megarl.training.rank import Rank
from tests.support.tiny import write_tiny_model
from tests.training.harness import VOCAB, actor_spec, assert_same, weights
from tests.training.samples import examples, shards

pytestmark = pytest.mark.gpu

MIB = 2**20
PARAMETER_BYTES = 16  # of Adam in float32: the weight, its gradient, two moments


@pytest.fixture
def rank(platform: Platform) -> Iterator[Rank]:
    made = Rank(0, 1, platform.name, seed=1)
    made.rendezvous("127.0.0.1", made.free_port(), timeout_s=60)
    yield made
    made.close()


def taken_of_the_device() -> int:
    """By all processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_memory_of_the_device_is_counted(platform: Platform) -> None:
    reset_peak_bytes(platform)
    before = held_bytes(platform)
    block = torch.zeros(64 * MIB, dtype=torch.uint8, device=platform.device)
    assert held_bytes(platform) - before >= 64 * MIB
    del block
    return_free_memory(platform)
    assert held_bytes(platform) == before
    assert peak_bytes(platform) - before >= 64 * MIB


def test_a_role_that_sleeps_gives_its_bytes_back_and_wakes_the_same(
    platform: Platform, rank: Rank, tmp_path: Path
) -> None:
    """Of 48 million parameters: what the role says that it freed, this process and the device say as well."""
    folder = write_tiny_model(
        tmp_path / "model",
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=8,
        head_dim=128,
    )
    return_free_memory(platform)
    rank.build("actor", actor_spec(folder))
    [shard], [columns] = shards([examples([9, 30], VOCAB)])
    rank.update("actor", shard, columns)
    return_free_memory(platform)
    kept, awake, device_awake = weights(rank, "actor"), held_bytes(platform), taken_of_the_device()
    needed = PARAMETER_BYTES * sum(tensor.numel() for tensor in kept.values())
    freed = rank.sleep("actor")
    assert needed <= freed < 1.05 * needed
    assert awake - held_bytes(platform) > 0.95 * freed
    assert device_awake - taken_of_the_device() > 0.9 * freed
    assert rank.engine("actor")._offload.device_bytes() == dict.fromkeys(PARTS, 0)
    assert rank.wake("actor") == freed
    assert held_bytes(platform) > 0.95 * awake
    assert_same(weights(rank, "actor"), kept)
    rank.update("actor", shard, columns)
