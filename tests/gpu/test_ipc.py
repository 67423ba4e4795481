"""Device memory that two processes share: what a rank puts there, a process like a server reads, bucket after bucket."""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from megarl.core.platform import Platform, held_bytes
from megarl.models.hf_weights import Bucket
from megarl.serving.client import ServerEndpoint
from megarl.sync.device_segment import DeviceSegment
from megarl.sync.memory import DeviceMemory
from tests.sync.written import Written

pytestmark = pytest.mark.gpu

SERVER = ServerEndpoint("server", "http://127.0.0.1:9", "key")
BYTES = 1 << 20


@pytest.fixture
def reader() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.reader"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.communicate(timeout=60)


def ask(reader: subprocess.Popen[str], payload: str) -> dict[str, float]:
    assert reader.stdin is not None and reader.stdout is not None
    reader.stdin.write(payload + "\n")
    reader.stdin.flush()
    found: dict[str, float] = json.loads(reader.stdout.readline())
    return found


def bucket(version: int, device: str) -> Bucket:
    """Of two dtypes."""
    wide = torch.full((300, 7), 0.5 * version, device=device)
    return [("wide", wide), ("narrow", torch.full((1000,), 3.0 * version, dtype=torch.bfloat16, device=device))]


def test_another_process_reads_what_was_put_on_the_device(platform: Platform, reader: subprocess.Popen[str]) -> None:
    before = held_bytes(platform)
    memory = DeviceMemory(rank=0, hosts={SERVER.name: (0,)}, make=partial(DeviceSegment, device=platform.device))
    memory.take(BYTES)
    for version in (1, 2, 3):
        for start in (0, BYTES // 2):
            pieces = Written([bucket(version, platform.device)])
            memory.fill(pieces, 0, start, [SERVER.name])
            [payload] = memory.payloads(SERVER, pieces.buckets[0], start)
            assert ask(reader, payload) == {"wide": 1050.0 * version, "narrow": 3000.0 * version}
    memory.close()
    del pieces
    torch.cuda.ipc_collect()
    assert held_bytes(platform) == before


def test_another_process_writes_into_what_was_taken_on_the_device(platform: Platform) -> None:
    """As a rank of the node does, into the memory of the one that sends."""
    before = held_bytes(platform)
    memory = DeviceSegment(BYTES, platform.device)
    memory.flat.zero_()
    torch.cuda.synchronize()
    handle = base64.b64encode(pickle.dumps(memory.share())).decode()
    code = (
        "import base64, pickle, sys, torch\n"
        "from megarl.sync.device_segment import DeviceSegment\n"
        "opened = DeviceSegment.open(pickle.loads(base64.b64decode(sys.stdin.read())), 'cuda')\n"
        "opened.flat[100:200].fill_(7)\n"
        "torch.cuda.synchronize()\n"
        "opened.close()\n"
    )
    subprocess.run([sys.executable, "-c", code], input=handle, text=True, check=True, timeout=60)
    assert memory.flat.long().sum().item() == 700 and (memory.flat[100:200] == 7).all()
    memory.close()
    torch.cuda.ipc_collect()
    assert held_bytes(platform) == before
