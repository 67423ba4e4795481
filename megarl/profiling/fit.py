"""From what a profile measured to the figures of a cluster file, and how well these describe the measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megarl.models.config import ModelConfig
from megarl.placement.calibrate import Pairs, error, fit
from megarl.placement.cluster import Cluster
from megarl.placement.compute import score_seconds, update_seconds
from megarl.placement.generation import rollout_seconds
from megarl.placement.lengths import Lengths
from megarl.placement.memory import server_bytes
from megarl.placement.server_share import sharing
from megarl.placement.space import Servers, one_layout
from megarl.placement.workload import Workload
from megarl.profiling.job import Dtype, Measured, Raw
from megarl.profiling.servers import MAX_RUNNING, PROMPT_TOKENS, Generated, served_bytes

TRAINING = (
    "at_once",
    "matmul",
    "layer_s",
    "sequence_s",
    "cut_sequence_s",
    "update_s",
    "hop_s",
    "links",
    "micro_s",
    "call_s",
)
SERVING = ("servers_at_once", "decode_sequence_s", "decode_layer_s", "decode_s", "request_s", "serving")
# Where a fit starts which the table has no figure for, seconds.
STARTS = {
    "micro_s": 1e-4,
    "sequence_s": 1e-5,
    "cut_sequence_s": 1e-5,
    "decode_sequence_s": 1e-5,
    "call_s": 1e-3,
    "sync_s": 1e-2,
    "request_s": 1e-4,
}
# Devices that lose less than this share to each other do not share cores.
LOST = 0.1


@dataclass(frozen=True)
class Findings:
    """Everything that a profile measured. configs: of the reference models; the first is the one that was served."""

    dtype: Dtype
    configs: tuple[ModelConfig, ...]
    ranks: tuple[Measured, ...]
    generated: tuple[Generated, ...] = ()

    def raw(self, world_size: int) -> Raw:
        """What so many ranks reached outside of models."""
        return next(each.raw for each in self.ranks if each.world_size == world_size)


@dataclass(frozen=True)
class Fitted:
    """The cluster as measured. training_error, serving_error: mean |log(predicted / measured)| over what was fitted."""

    cluster: Cluster
    training_error: float
    serving_error: float | None


def fit_cluster(base: Cluster, found: Findings) -> Fitted:
    """The table's cluster with every figure that was measured in place of its own."""
    cluster = _devices(base, found)
    shared = [name for name in TRAINING if name != "at_once" or np.isfinite(cluster.rates.at_once)]
    most = max(each.world_size for each in found.ranks)
    if most == 1:
        shared = [name for name in shared if name not in ("hop_s", "links", "at_once")]
    cluster = fit(cluster, shared, lambda each: training_pairs(each, found), limits={"at_once": float(most)})
    training = error(training_pairs(cluster, found))
    if not found.generated:
        return Fitted(cluster, training, None)
    names = [name for name in SERVING if name != "servers_at_once" or max(g.servers for g in found.generated) > 1]
    cluster = fit(cluster, names, lambda each: serving_pairs(each, found))
    return Fitted(cluster, training, error(serving_pairs(cluster, found)))


def _devices(base: Cluster, found: Findings) -> Cluster:
    """What needs no fit: data rates, latencies, and whether devices share cores."""
    counts = sorted(each.world_size for each in found.ranks)
    alone = found.raw(1)
    device = replace(
        base.device, memory_bytes_s=alone.memory_bytes_s, host_bytes_s=alone.host_bytes_s / base.rates.host
    )
    rates = replace(
        base.rates,
        **{name: getattr(base.rates, name) or start for name, start in STARTS.items()},
        matmul=0.9,
        links=1.0,
    )
    single = found.dtype == "float32"
    if single:
        device = replace(device, fp32_flops=alone.flops)
    else:
        # What was reached is above the data sheet's figure where that is of another clock.
        device = replace(device, matmul_flops=alone.flops, flops=max(alone.flops, device.flops))
    if counts[-1] > 1:
        raw = found.raw(counts[1])
        small, large = min(raw.all_gather_s), max(raw.all_gather_s)
        moved = (large - small) * (counts[1] - 1) / counts[1]
        seconds = max(raw.all_gather_s[large] - raw.all_gather_s[small], 1e-9)
        device = replace(device, inside_bytes_s=moved / seconds)
        at_once = max(count * found.raw(count).flops / alone.flops for count in counts)
        shares = at_once < (1 - LOST) * counts[-1]
        rates = replace(rates, hop_s=raw.all_gather_s[small], at_once=max(at_once, 1.0) if shares else np.inf)
    servers = max((each.servers for each in found.generated), default=1)
    synced = [each.sync_s for each in found.ranks if each.sync_s is not None]
    rates = replace(
        rates,
        # Below their number, for above it the fit would feel no slope.
        servers_at_once=0.9 * servers if np.isfinite(rates.at_once) else np.inf,
        sync_s=synced[0] if synced else rates.sync_s,
    )
    return replace(base, device=device, rates=rates, devices_per_node=max(base.devices_per_node, counts[-1]))


def training_pairs(cluster: Cluster, found: Findings) -> Pairs:
    """Predicted and measured seconds of every pass and update."""
    pairs = []
    for each in (timed for ranks in found.ranks for timed in ranks.timed):
        config, choice = found.configs[each.case.model], one_layout(each.case.layout, each.case.micro_tokens)
        work = _workload(config, each.case.sequences, each.case.tokens / 2, each.case.tokens / 2, found.dtype)
        pairs.append((float(score_seconds(config, choice, work, cluster).total[0]), each.score_s))
        pairs.append((float(update_seconds(config, choice, work, cluster).total[0]), each.update_s))
    return pairs


def serving_pairs(cluster: Cluster, found: Findings) -> Pairs:
    """Predicted and measured seconds of every time that requests were answered."""
    config, pairs = found.configs[0], []
    for each in found.generated:
        work = _workload(config, each.requests, PROMPT_TOKENS, each.tokens, found.dtype)
        one = np.array([1], np.int64)
        held = served_bytes(config, work.bytes_each) + cluster.rates.server_bytes
        count = np.array([each.servers], np.int64)
        choice = Servers(count, one, np.ones(1), count)
        choice = replace(choice, share=sharing(choice, cluster, held * (1 + 1e-9)))
        bytes_held = server_bytes(config, choice, cluster, work.bytes_each)
        pairs.append((float(rollout_seconds(config, choice, bytes_held, work, cluster).total[0]), each.seconds))
    return pairs


def _workload(config: ModelConfig, samples: int, prompt_tokens: float, response: float, dtype: Dtype) -> Workload:
    return Workload(
        models={"rollout": config},
        prompts=samples,
        samples_per_prompt=1,
        mini_batches=1,
        prompt_tokens=prompt_tokens,
        responses=Lengths((0.0, 1.0), (response, response), response),
        longest_sample=round(prompt_tokens + response),
        micro_tokens=(),
        max_running=MAX_RUNNING,
        dtype=dtype,
    )


def error_words(fitted: Fitted) -> Sequence[str]:
    """How well the figures describe what was measured."""
    lines = [f"passes and updates: off by {fitted.training_error:.0%} on average"]
    if fitted.serving_error is not None:
        lines.append(f"generation: off by {fitted.serving_error:.0%} on average")
    return lines
