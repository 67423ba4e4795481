"""A vision tower that learns: what servers hold and say of images when its weights have been sent."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megarl.cluster.weight_sync import TOLERANCES
from megarl.core.errors import SyncError
from megarl.serving.client import ServerClient
from megarl.serving.images import SentImages
from megarl.serving.server_models import SEEN_MB
from megarl.sync.verify import probe_servers, split_column, verify
from tests.support.forked_servers import Copies
from tests.support.hashes import differing
from tests.support.platforms import chosen
from tests.support.seeing import Seeing, Shown, seeing
from tests.support.served import NEEDS
from tests.support.vision import QWEN2, QWEN2_5, QWEN3, QWEN3_MOE, png
from tests.sync.given import BroadcastBuckets
from tests.sync.written import DiskBuckets, SharedBuckets

pytestmark = pytest.mark.needs(*NEEDS)
CLOSE = 1e-5  # nats


@pytest.fixture(
    scope="module",
    params=[
        (QWEN3, 1),
        *(pytest.param((name, 1), marks=pytest.mark.slow) for name in (QWEN2, QWEN2_5, QWEN3_MOE)),
        *(pytest.param((name, 2), marks=pytest.mark.slow) for name in (QWEN2, QWEN2_5, QWEN3, QWEN3_MOE)),
    ],
    ids=lambda each: f"{each[0]}-tp{each[1]}",
)
def learning(
    request: pytest.FixtureRequest, copies: Copies, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seeing]:
    """A server of a model whose tower learns."""
    architecture, tp = request.param
    with seeing(copies, tmp_path_factory.mktemp("learning"), architecture, tp, tower_learns=True) as found:
        yield found


def prompt(seen: Seeing) -> Shown:
    """Words and an image."""
    square = seen.reference.vision.square
    return seen.reference.shown([5, 6, 7], png(3 * square, 2 * square), [8, 9])


def off(seen: Seeing) -> float:
    """How far the server is from transformers in what it says behind an image."""

    async def asked() -> float:
        shown = prompt(seen)
        async with ServerClient(seen.endpoint) as client:
            return seen.off(shown, await seen.ask(client, shown, 6))

    return asyncio.run(asked())


def wrong_by(seen: Seeing) -> float:
    """What the probe of a sync finds, which has an image. Raises SyncError where the tower is another."""
    shown = prompt(seen)
    probe, images = [[5, 6, 7, 8], shown.ids], SentImages(tuple(shown.images), seen.reference.vision.image_token)
    answers = asyncio.run(probe_servers([seen.endpoint], probe, 60.0, images))
    assert answers.failed == {}
    said = [seen.reference.logprobs(probe[0], []), seen.reference.logprobs(shown.ids, shown.images)]
    column = np.concatenate([np.append(row, np.float32(0)) for row in said])
    return verify(split_column(column, probe, images), answers.logprobs, TOLERANCES["float32"], 1)


def differs(seen: Seeing) -> list[str]:
    """Tensors of the server that are not the trainer's."""
    trainer = seen.reference
    tensors = dict([*trainer.sent_tower(), *trainer.text()])
    return differing(seen.endpoint, seen.folder, tensors=tensors, tower=True)


@pytest.mark.parametrize("transport", ["broadcast", "shared_memory", "disk", "disk in place"])
def test_a_server_sees_with_the_weights_of_the_tower_that_were_sent(
    learning: Seeing, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport == "broadcast" and chosen().backend != "gloo":
        pytest.skip("needs gloo between both ends, and servers on devices take NCCL")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # as in the processes of a run
    trainer = learning.reference
    sender: BroadcastBuckets | SharedBuckets | DiskBuckets = SharedBuckets(tmp_path / "registry")
    if transport == "broadcast":
        sender = BroadcastBuckets()
    elif transport != "shared_memory":
        sender = DiskBuckets(tmp_path, in_place=transport.endswith("place"))
    for version in (1, 2):  # the second time the disk has what changed
        assert differs(learning) == [] and off(learning) < CLOSE
        trainer.perturb(10 * version + len(transport), tower=True)
        wrong = differs(learning)
        assert wrong and all(name.startswith("visual.") for name in wrong)
        assert off(learning) > 1e-3
        with pytest.raises(SyncError, match="did not arrive as it was sent on server"):
            wrong_by(learning)
        report = sender.send(lambda: iter(trainer.buckets(tower=True)), version, [learning.endpoint])
        assert report is not None and report.failed == {}
        assert differs(learning) == [] and off(learning) < CLOSE and wrong_by(learning) < CLOSE
    sender.close()


@pytest.mark.slow
def test_sglang_goes_on_with_the_old_tower_where_it_keeps_what_that_said(copies: Copies, tmp_path: Path) -> None:
    """Why such servers keep nothing: where this fails, SGLang has learned to forget, and they may keep it."""
    with seeing(copies, tmp_path, QWEN3) as found:
        assert found.server.command.env[SEEN_MB] != "0"
        trainer, sender = found.reference, SharedBuckets(tmp_path / "registry")
        assert off(found) < CLOSE
        trainer.perturb(1, tower=True)
        report = sender.send(lambda: iter(trainer.buckets(tower=True)), 1, [found.endpoint])
        sender.close()
        assert report is not None and report.failed == {}
        assert differs(found) == []

        async def flush() -> None:
            async with ServerClient(found.endpoint) as client:
                await client.flush_cache()

        asyncio.run(flush())
        assert off(found) > 1e-3
