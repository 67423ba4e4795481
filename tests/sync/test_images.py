"""Weights sent to real servers of models that see images: the text part is the trainer's, the tower their own."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megarl.models.hf_config import load_model_config
from megarl.models.multimodal import TOWER
from megarl.serving.client import ServerClient
from megarl.serving.server import ServerSpec
from megarl.sync.hashes import ExpectedSums, Sums, differences, server_sums
from megarl.sync.tensor_hash import flat_bytes, make_hash
from megarl.sync.verify import probe_servers, verify
from tests.support.forked_servers import Copies
from tests.support.hashes import differing
from tests.support.platforms import chosen
from tests.support.seeing import HfVision, Seeing
from tests.support.served import NEEDS
from tests.support.sglang_held import sums_of
from tests.support.vision import QWEN2_5, QWEN3, QWEN3_MOE, Architecture, png, write_tiny_vision_model
from tests.sync.given import BroadcastBuckets
from tests.sync.written import DiskBuckets, SharedBuckets

pytestmark = pytest.mark.needs(*NEEDS)
PROBE = [[5, 6, 7, 8, 9, 10], [40, 30, 20]]


def sums(tensors: Mapping[str, torch.Tensor]) -> Sums:
    """Hashes of whole tensors."""
    found = {}
    for name, tensor in tensors.items():
        growing = make_hash(chosen().tensor_hash)
        for flat in flat_bytes(tensor.detach()):
            growing.update(flat)
        found[name] = growing.hexdigest()
    return found


def tower_at(seen: Seeing) -> Sums:
    """What the server says of its own."""
    [told] = asyncio.run(server_sums(seen.endpoint, 60.0))
    return {name: digest for name, digest in told.items() if name.startswith(TOWER)}


@pytest.mark.parametrize("transport", ["broadcast", "shared_memory", "disk", "disk in place"])
def test_the_text_part_arrives_by_every_transport_and_the_tower_stays(
    seen: Seeing, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport == "broadcast" and chosen().backend != "gloo":
        pytest.skip("needs gloo between both ends, and servers on devices take NCCL")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # as in the processes of a run
    trainer, tower = seen.reference, sums(seen.reference.tower())
    assert tower_at(seen) == tower
    trainer.perturb(len(transport))
    assert differing(seen.endpoint, seen.folder, tensors=dict(trainer.text())) != []
    sender: BroadcastBuckets | SharedBuckets | DiskBuckets = SharedBuckets(tmp_path / "registry")
    if transport == "broadcast":
        sender = BroadcastBuckets()
    elif transport != "shared_memory":
        sender = DiskBuckets(tmp_path, in_place=transport.endswith("place"))
    report = sender.send(lambda: iter(trainer.buckets()), 1, [seen.endpoint])
    sender.close()
    assert report is not None and report.failed == {}
    assert differing(seen.endpoint, seen.folder, tensors=dict(trainer.text())) == []
    assert tower_at(seen) == tower
    answers = asyncio.run(probe_servers([seen.endpoint], PROBE, 60.0))
    assert verify([trainer.logprobs(row, []) for row in PROBE], answers.logprobs, 1e-4, 1) < 1e-5
    square = trainer.vision.square
    shown = trainer.shown([5, 6, 7], png(3 * square, 2 * square), [8, 9])

    async def off() -> float:
        async with ServerClient(seen.endpoint) as client:
            return seen.off(shown, await seen.ask(client, shown, 6))

    assert asyncio.run(off()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [QWEN2_5, QWEN3, QWEN3_MOE])
def test_what_the_ranks_of_a_server_would_hold_of_the_text_part_is_known(
    architecture: Architecture, copies: Copies, tmp_path: Path
) -> None:
    model = write_tiny_vision_model(tmp_path / "model", architecture, tied=True, text={"vocab_size": 130})
    (tmp_path / "ranks").mkdir()
    found = sums_of(copies, ServerSpec(model, "float32", tp=2), tmp_path / "ranks")
    assert any(name.startswith(TOWER) for name in found[1])
    expected = ExpectedSums(load_model_config(model), [2], torch.float32, chosen())
    for name, tensor in HfVision(model, architecture).text():
        expected.add(name, tensor)
    assert differences(expected.finish()[2], found) == []
