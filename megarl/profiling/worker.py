"""One rank of a profile, in a process of its own: times raw operations, then passes and updates of reference models.

Megatron is met by way of training's Rank, with no Ray around it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from megarl.core.layout import Layout, dp_rank
from megarl.core.platform import Platform, finish_copies, get_platform, visible_cuda_devices
from megarl.core.types import Column, Prompt, Sample, Shard, Status
from megarl.data.pack import column_like, pack
from megarl.models.hf_config import load_model_config
from megarl.profiling.job import Case, Job, Measured, Raw, Timed
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.roles import Optimizer
from megarl.training.rank import EXPORT_BUCKET_BYTES, Rank
from megarl.training.spec import PolicyObjective, RoleSpec

ROLE = "reference"
# A timed matrix product takes at least so long: shorter ones are mostly the call.
LEAST_S = 0.02
SMALLEST_MATRIX, LARGEST_MATRIX = 256, 16384
# Bytes of a copy, and of a small and a large message. Of devices so many that the calls and waits for it are a small part.
HOST_COPIED, HOST_MESSAGES = 2**26, (2**12, 2**22)
DEVICE_COPIED, DEVICE_MESSAGES = 2**30, (2**12, 2**28)
RAW_REPEATS = 8


def measure(rank: int, job: Job) -> Measured:
    """Everything that this rank is asked for; collective, and the answer of rank 0 is the one that counts."""
    platform = get_platform(job.platform)
    os.environ.update(platform.env)
    if platform.has_device_memory:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_cuda_devices()[rank]
    own = Rank(rank, job.world_size, job.platform, seed=1)
    own.rendezvous("127.0.0.1", job.port, job.deadline_s)
    try:
        raw = _raw(platform, job)
        timed = tuple(_time_case(own, platform, job, case) for case in job.cases)
        return Measured(job.world_size, raw, timed, _sync_s(own, platform, job) if job.servers else None)
    finally:
        own.close()


def _seconds(platform: Platform, world_size: int, repeats: int, work: Callable[[], object]) -> float:
    """Median seconds until every rank has done the work; the first time is not counted."""
    import torch.distributed as dist

    taken = []
    for _ in range(1 + repeats):
        if world_size > 1:
            dist.barrier()
        finish_copies(platform)
        began = time.perf_counter()
        work()
        finish_copies(platform)
        if world_size > 1:
            dist.barrier()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def _raw(platform: Platform, job: Job) -> Raw:
    import torch
    import torch.distributed as dist

    dtype = getattr(torch, job.dtype)

    def timed(work: Callable[[], object]) -> float:
        return _seconds(platform, job.world_size, RAW_REPEATS, work)

    size = SMALLEST_MATRIX
    while True:
        # Of random numbers, as they are in models: where power limits the clock, constant ones are multiplied faster.
        matrix = torch.randn(size, size, device=platform.device, dtype=dtype)
        matmul_s = timed(partial(torch.matmul, matrix, matrix))
        # Every rank has to come to the same decision.
        decision = torch.tensor([matmul_s], device=platform.device)
        if job.world_size > 1:
            dist.broadcast(decision, src=0)
        if decision.item() >= LEAST_S or size >= LARGEST_MATRIX:
            break
        size *= 2
    copied, messages = HOST_COPIED, HOST_MESSAGES
    if platform.has_device_memory:
        copied, messages = DEVICE_COPIED, DEVICE_MESSAGES
    block = torch.ones(copied // 4, device=platform.device)
    target = torch.empty_like(block)
    host = torch.empty(block.shape, pin_memory=platform.has_device_memory)  # as what is offloaded
    copy_s, host_s = timed(lambda: target.copy_(block)), timed(lambda: host.copy_(block))
    reduces, gathers = {}, {}
    for count in messages if job.world_size > 1 else ():
        whole = torch.ones(count // 4, device=platform.device)
        part = whole[: len(whole) // job.world_size].clone()
        reduces[count] = timed(partial(dist.all_reduce, whole))
        gathers[count] = timed(partial(dist.all_gather_into_tensor, whole, part))
    return Raw(2 * size**3 / matmul_s, 2 * copied / copy_s, copied / host_s, reduces, gathers)


def _time_case(rank: Rank, platform: Platform, job: Job, case: Case) -> Timed:
    folder = job.models[case.model]
    algorithm = Algorithm()
    rank.build(ROLE, _spec(folder, job, case.layout, algorithm))
    shard = _shards(case, algorithm, load_model_config(folder).vocab_size)[dp_rank(rank.rank, case.layout)]
    zeros = column_like(shard, np.zeros(case.sequences))
    columns: dict[str, Column] = {"old_logprobs": zeros, "advantages": column_like(shard, np.ones(case.sequences))}
    score_s = _seconds(platform, job.world_size, job.repeats, lambda: rank.logprobs(ROLE, shard))
    update_s = _seconds(platform, job.world_size, job.repeats, lambda: rank.update(ROLE, shard, columns))
    return Timed(case, score_s, update_s)


def _sync_s(rank: Rank, platform: Platform, job: Job) -> float:
    """Median seconds of sending the first model, which the servers have, to all of them; the first time is not counted."""
    from megarl.sync.sending import Sending
    from megarl.sync.transport import make_transport

    rank.build(ROLE, RoleSpec(job.models[0], job.dtype))
    sending = Sending("broadcast", (0,), (0,), (Path("unused"),), EXPORT_BUCKET_BYTES, job.deadline_s)
    transport = make_transport(sending, rank=0, host="127.0.0.1", platform=platform, control=None)
    try:
        seconds = []
        for version in range(1, 2 + job.repeats):
            report = transport.send(rank.engine(ROLE), version, job.servers)
            assert report is not None and not report.failed, report
            seconds.append(report.seconds)
        return statistics.median(seconds[1:])
    finally:
        transport.close()


def _spec(folder: Path, job: Job, layout: Layout, algorithm: Algorithm) -> RoleSpec:
    return RoleSpec(
        folder,
        job.dtype,
        optimizer=Optimizer(),
        total_steps=1_000_000,
        objective=PolicyObjective(algorithm),
        layout=replace(layout, sequence_parallel=layout.tp > 1),
    )


def _shards(case: Case, algorithm: Algorithm, vocab: int) -> list[Shard]:
    """The case's sequences, half prompt and half response, assigned and packed as a step's samples are."""
    random = np.random.default_rng(0)
    half = case.tokens // 2
    samples = []
    for index in range(case.sequences):
        ids = random.integers(0, vocab, case.tokens).astype(np.int32)
        response = ids[half:]
        samples.append(
            Sample(
                id=str(index),
                group_id=str(index),
                prompt=Prompt(str(index), ids[:half], "", ""),
                response_ids=response,
                response_text="",
                loss_mask=np.ones(len(response), np.uint8),
                rollout_logprobs=np.zeros(len(response), np.float32),
                versions=(),
                status=Status.COMPLETED,
            )
        )
    return pack(
        samples,
        num_shards=case.layout.dp,
        mini_batch_samples=case.sequences,
        micro_batch_tokens=case.micro_tokens,
        reduction=algorithm.reduction,
        max_response_tokens=case.tokens,
    )
