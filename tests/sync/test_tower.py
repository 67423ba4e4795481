"""A vision tower that learns: what servers hold and say of images when its weights have been sent."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.cluster.weight_sync import TOLERANCES
from megarl.core.errors import SyncError
from megarl.core.ports import free_port
from megarl.models.hf_config import load_model_config
from megarl.models.tower_files import with_tower
from megarl.serving.client import ServerClient
from megarl.serving.images import SentImages
from megarl.serving.server import ServerSpec
from megarl.serving.server_models import SEEN_MB
from megarl.sync.hashes import ExpectedSums, differences
from megarl.sync.verify import probe_servers, split_column, verify
from tests.support.forked_ranks import Ranks
from tests.support.forked_servers import Copies
from tests.support.hashes import differing
from tests.support.platforms import chosen
from tests.support.seeing import HfVision, Seeing, Shown, seeing
from tests.support.served import NEEDS
from tests.support.sglang_held import sums_of
from tests.support.vision import QWEN2, QWEN2_5, QWEN3, QWEN3_MOE, Architecture, png, write_tiny_vision_model
from tests.sync.given import BroadcastBuckets
from tests.sync.hash_ranks import DEVICES, ROWS, Job
from tests.sync.test_hashes import TRANSPORTS, servers_of
from tests.sync.written import DiskBuckets, SharedBuckets

pytestmark = pytest.mark.needs(*NEEDS)
CLOSE = 1e-5  # nats


# Every transport with one model; how each model's servers load what comes, by one of them.
SENT = [
    *(((QWEN3, 1), transport) for transport in ("broadcast", "shared_memory", "disk", "disk in place")),
    *(
        pytest.param((name, 2), transport, marks=pytest.mark.slow)
        for name, transport in {
            QWEN2: "shared_memory",
            QWEN2_5: "disk",
            QWEN3: "broadcast",
            QWEN3_MOE: "shared_memory",
        }.items()
    ),
]


@pytest.fixture(scope="module")
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


async def flushed(seen: Seeing) -> None:
    """Have the server forget all cached prefixes."""
    async with ServerClient(seen.endpoint) as client:
        await client.flush_cache(10.0)


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


@pytest.mark.parametrize(("learning", "transport"), SENT, indirect=["learning"], ids=str)
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
        flush = version == 1
        report = sender.send(lambda: iter(trainer.buckets(tower=True)), version, [learning.endpoint], flush_cache=flush)
        assert report is not None and report.failed == {}
        # The probe reads no cached prefix. Other requests do, and the prefix is of what the old tower saw.
        assert differs(learning) == [] and wrong_by(learning) < CLOSE
        if not flush:
            assert off(learning) > 1e-3
            asyncio.run(flushed(learning))
        assert off(learning) < CLOSE
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
        asyncio.run(flushed(found))
        assert off(found) > 1e-3


# Sizes that ranks do not share evenly, and positions that fill up a table: heads of two ranks in four, and an MLP of odd width.
ODD: dict[str, dict[str, Any]] = {
    QWEN2: {},
    QWEN2_5: {"intermediate_size": 44},
    QWEN3: {"intermediate_size": 44, "num_position_embeddings": 81},
    QWEN3_MOE: {"intermediate_size": 44, "num_position_embeddings": 81},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "tp", "devices", "dtype"),
    [
        *((name, 2, devices, "float32") for name in ODD for devices in (False, True)),
        *((name, 4, False, "float32") for name in (QWEN2_5, QWEN3)),
        *((name, 1, False, "bfloat16") for name in ODD),
    ],
)
def test_what_the_ranks_of_a_server_would_hold_of_the_tower_is_known(
    architecture: Architecture, tp: int, devices: bool, dtype: Any, copies: Copies, tmp_path: Path
) -> None:
    """devices: as SGLang's loaders cut weights there."""
    model = write_tiny_vision_model(tmp_path / "model", architecture, tower=ODD[architecture])
    (tmp_path / "ranks").mkdir()
    found = sums_of(copies, ServerSpec(model, dtype, tp=tp), tmp_path / "ranks", as_on_devices=devices)
    platform = replace(chosen(), pads_weights=not devices)
    expected = ExpectedSums(with_tower(load_model_config(model), model), [tp], getattr(torch, dtype), platform)
    trainer = HfVision(model, architecture)
    for name, tensor in (*trainer.sent_tower(), *trainer.text()):
        expected.add(name, tensor)
    assert differences(expected.finish()[tp], found) == []


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [QWEN2_5, QWEN3])
def test_servers_of_any_size_hold_the_tower_of_a_trainer_at_any_layout(
    architecture: Architecture, ranks: Ranks, copies: Copies, tmp_path: Path
) -> None:
    """The ranks of the first stage have all of the tower, whatever the rest is cut by."""
    # Layers that features are added behind are all of the first stage.
    start, *models = (
        write_tiny_vision_model(tmp_path / f"{seed}", architecture, seed=seed, text={"num_hidden_layers": 6})
        for seed in (3, 1, 2)
    )
    layouts: dict[int, list[tuple[dict[str, Any], list[str]]]] = {4: [({"tp": 2, "pp": 2}, TRANSPORTS)]}
    if architecture == QWEN2_5:
        layouts = {
            1: [({}, ["shared_memory"])],
            2: [({"pp": 2}, ["broadcast", DEVICES]), ({"tp": 2, "sequence_parallel": True}, ["disk"])],
        }
    with servers_of(copies, tmp_path, start, (1, 2)) as servers:
        for world_size, each in layouts.items():
            job = Job(
                free_port(),
                world_size,
                [sizes for sizes, _ in each],
                [transports for _, transports in each],
                [str(model) for model in models],
                [asdict(server) for server in servers],
                str(tmp_path),
                tower=True,
            )
            file, log = job.write(tmp_path / f"{world_size}.json"), tmp_path / f"{world_size}.log"
            assert ranks.run("tests.sync.tower_ranks", world_size, file, log=log) == "", log.read_text()
    assert len((tmp_path / ROWS).read_text().splitlines()) == len(TRANSPORTS)
