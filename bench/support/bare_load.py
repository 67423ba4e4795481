"""What a model's bytes take into a server's model with nothing of megarl between: two processes, and SGLang's own load.

One process has all tensors ready; the other has the model as SGLang's server builds it, and fills it by SGLang's
`load_weights`, bucket by bucket, as its server does. No HTTP, no gathering, no names to look up.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

Bucket = list[tuple[str, Any]]  # HF names and tensors
Load = Callable[[Bucket], None]
RING = 4  # buckets in shared memory at once
WAIT_S = 120.0
POLL_S = 5e-5


@dataclass(frozen=True)
class BareLoads:
    """Median seconds. in_place: each bucket is received into memory that is at hand, as large as the model, and no more; fresh:
    into fresh tensors. serial: and then loaded, as SGLang's server does it. ahead: the next is received meanwhile, which its
    server cannot. shared: one process writes buckets into shared memory, and the other loads those before.
    """

    in_place_s: float
    fresh_s: float
    serial_s: float
    ahead_s: float
    shared_s: float


def bare_loads(rank: int, port: int, folder: Path, sent_bytes: int, shared_bytes: int, repeats: int) -> BareLoads:
    """Each of two ranks' part. sent_bytes, shared_bytes: of the buckets of a broadcast, and in shared memory."""
    from safetensors.torch import load_file
    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

    load = _sglang_load(folder) if rank == 1 else None
    timeout = timedelta(seconds=WAIT_S)
    store = TCPStore("127.0.0.1", port, 2, rank == 0, timeout, wait_for_workers=False)
    group = ProcessGroupGloo(PrefixStore("bare", store), rank, 2, timeout)
    tensors = [each for path in sorted(folder.glob("*.safetensors")) for each in load_file(path).items()]
    held = [(name, tensor.clone()) for name, tensor in tensors]  # as a trainer's: not in the files' pages
    sent, shared = list(_packed(held, sent_bytes)), list(_packed(held, shared_bytes))
    ring = Ring(Path("/dev/shm") / f"bare-load-{os.getppid()}", shared)
    works: list[Callable[[], None]]
    if load is None:
        works = [*[lambda: _send(group, sent)] * 4, lambda: _write(shared, ring)]
    else:
        works = [
            lambda: _send(group, sent),  # who receives a broadcast calls the same
            lambda: _receive(group, sent, lambda _: None),
            lambda: _receive(group, sent, load),
            lambda: _receive_ahead(group, sent, load),
            lambda: _read(shared, ring, load),
        ]
    found = [_median_s(group, work, repeats) for work in works]
    ring.close()
    return BareLoads(*found)


def _median_s(group: Any, work: Callable[[], None], repeats: int) -> float:
    """Of both processes, from their meeting to when both are done; the first time does not count."""
    taken = []
    for _ in range(1 + repeats):
        group.barrier().wait()
        began = time.perf_counter()
        work()
        group.barrier().wait()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def _packed(tensors: Bucket, bucket_bytes: int) -> Iterator[Bucket]:
    bucket: Bucket = []
    for name, tensor in tensors:
        if bucket and sum(other.nbytes for _, other in bucket) + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket = []
        bucket.append((name, tensor))
    yield bucket


def _broadcast(group: Any, tensor: Any) -> Any:
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([tensor], options)


def _send(group: Any, buckets: list[Bucket]) -> None:
    for bucket in buckets:
        for work in [_broadcast(group, tensor) for _, tensor in bucket]:
            work.wait()


def _begun(group: Any, bucket: Bucket) -> tuple[Bucket, list[Any]]:
    fresh = [(name, tensor.new_empty(tensor.shape)) for name, tensor in bucket]
    return fresh, [_broadcast(group, tensor) for _, tensor in fresh]


def _receive(group: Any, buckets: list[Bucket], load: Load) -> None:
    for bucket in buckets:
        fresh, works = _begun(group, bucket)
        for work in works:
            work.wait()
        load(fresh)


def _receive_ahead(group: Any, buckets: list[Bucket], load: Load) -> None:
    fresh, works = _begun(group, buckets[0])
    for following in [*buckets[1:], None]:
        for work in works:
            work.wait()
        arrived = fresh
        if following is not None:
            fresh, works = _begun(group, following)
        load(arrived)


class Ring:
    """Shared memory of RING buckets, and how many were written and read so far."""

    def __init__(self, path: Path, buckets: list[Bucket]) -> None:
        import torch

        self._paths = path, path.with_suffix(".counts")
        size = max(sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets)
        flat = torch.from_file(str(path), shared=True, size=RING * size, dtype=torch.uint8)
        self._slots = flat.zero_().view(RING, size)  # memory that is at hand, as ours is from the second sync on
        self.counts = torch.from_file(str(self._paths[1]), shared=True, size=2, dtype=torch.int64)

    def place(self, number: int, bucket: Bucket) -> Bucket:
        """Where a bucket's tensors are."""
        flat, found, start = self._slots[number % RING], [], 0
        for name, tensor in bucket:
            found.append((name, flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)))
            start += tensor.nbytes
        return found

    def wait(self, which: int, count: int) -> None:
        """Until so many buckets were written (0), or read (1)."""
        end = time.monotonic() + WAIT_S
        while self.counts[which] < count:
            if time.monotonic() > end:
                raise TimeoutError(f"the other process did not come to bucket {count} within {WAIT_S:g} s")
            time.sleep(POLL_S)

    def close(self) -> None:
        """Remove the files."""
        for path in self._paths:
            path.unlink(missing_ok=True)


def _write(buckets: list[Bucket], ring: Ring) -> None:
    before = int(ring.counts[0])
    for number, bucket in enumerate(buckets):
        ring.wait(1, before + number - RING + 1)
        for (_, place), (_, tensor) in zip(ring.place(before + number, bucket), bucket, strict=True):
            place.copy_(tensor)
        ring.counts[0] += 1


def _read(buckets: list[Bucket], ring: Ring, load: Load) -> None:
    before = int(ring.counts[1])
    for number, bucket in enumerate(buckets):
        ring.wait(0, before + number + 1)
        load(ring.place(before + number, bucket))
        ring.counts[1] += 1


def _sglang_load(folder: Path) -> Load:
    """The load of the model as a server has it."""
    from megarl.core.platform import get_platform
    from megarl.serving import sglang_cpu
    from megarl.serving.server import ServerSpec
    from tests.support.sglang_fp8 import build

    sglang_cpu.load()
    flags = ServerSpec(folder, "float32", kv_tokens=1024, context_length=512).flags("127.0.0.1", 30000)
    load: Load = build([*get_platform().server_args, *flags]).load_weights
    return load
