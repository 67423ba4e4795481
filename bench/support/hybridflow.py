"""HybridFlow (arXiv 2409.19256v2) as its paper describes it: workloads, what was found best, and its software in our cost model.

The numbers in brackets are the paper's sections. What it says of its software, and what is therefore the same here:

- A100-80 nodes of 8, NVLink, 200 Gbit/s between nodes (8.1). Llama, prompts and responses of 1,024 tokens each, 1,024
  prompts, 8 updates of one epoch; the actor's generation shares its devices (5.1).
- Training is cut by tensor parallel 8, generation by 2 (7B), 4 (13B) and 8 (34B, 70B) (figure 14). Nothing is offloaded but the
  cache and the weights of generation (7, 8.2); the cache gets what memory is left (8.4).
- Each model's function runs in a process of its own (7). Generation returns its log-probs, so that the actor makes no pass (A).
- What is on other devices begins as soon as its inputs are there (4.1): a critic apart learns beside the next generation.
- Models on the same devices have layouts of their own, which start from the least model parallel that holds them all (6, C).

Assumed: optimizer states are not shared out over data-parallel ranks (else 13B would not need tensor parallel 8, nor 70B 64
devices). All answers are equally long and come in waves, as many as the cache holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from megarl.models.config import ModelConfig, Rope
from megarl.placement.cluster import Cluster, make_cluster
from megarl.placement.compute import score_seconds, update_seconds
from megarl.placement.devices import GIB
from megarl.placement.generation import prefill_seconds, step_model
from megarl.placement.lengths import lognormal
from megarl.placement.links import group_bytes_s
from megarl.placement.partitions import Partition, Pool, learns_late
from megarl.placement.sizes import kv_bytes, model_sizes
from megarl.placement.space import ALL_LAYERS, RECOMPUTE, Layouts
from megarl.placement.tables import has_head, held_bytes
from megarl.placement.workload import ACTOR, CRITIC, REFERENCE, REWARD, ROLLOUT, TRAINED, Workload
from megarl.recipe.section import Recompute

NODE, NODE_BYTES_S = 8, 200e9 / 8
# Weights into servers on the same devices, bytes a second: the paper has no figure of it.
COPY_BYTES_S = 4e9
TOKENS, PROMPTS, UPDATES = 1024, 1024, 8
USABLE = 0.96
COLOCATE, SPLIT, ALONE, CRITIC_ALONE = "colocate", "split", "standalone", "critic alone, the others together"
PARTITIONS: dict[str, Partition] = {
    COLOCATE: ((ACTOR, ROLLOUT, REFERENCE, CRITIC, REWARD),),
    SPLIT: ((ACTOR, ROLLOUT, REFERENCE), (CRITIC, REWARD)),
    ALONE: ((ACTOR, ROLLOUT), (REFERENCE,), (CRITIC,), (REWARD,)),
    CRITIC_ALONE: ((ACTOR, ROLLOUT, REFERENCE, REWARD), (CRITIC,)),
}


def llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        architecture="",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn_hidden_size=ffn,
        vocab_size=32000,
        max_positions=4096,
        rope=Rope(1e4),
        norm_eps=1e-5,
        tied_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        eos_token_ids=(2,),
    )


MODELS = {
    "7B": llama(32, 4096, 32, 32, 11008),
    "13B": llama(40, 5120, 40, 40, 13824),
    "34B": llama(48, 8192, 64, 8, 22016),
    "70B": llama(80, 8192, 64, 8, 28672),
}
GENERATION_TP = {"7B": 2, "13B": 4, "34B": 8, "70B": 8}


@dataclass(frozen=True)
class Finding:
    """On so many devices this placement was the fastest of those that were measured (8.3)."""

    actor: str
    critic: str
    devices: int
    winner: str

    @property
    def measured(self) -> tuple[str, ...]:
        """Placements that were compared: three by name and what their search found."""
        return (COLOCATE, SPLIT, ALONE, *([CRITIC_ALONE] if self.critic != self.actor else []))

    @property
    def words(self) -> str:
        """`13B, critic and reward 70B`."""
        return self.actor + (f", critic and reward {self.critic}" if self.critic != self.actor else "")

    def workload(self, micro_tokens: tuple[int, ...]) -> Workload:
        """The step."""
        actor, critic = MODELS[self.actor], MODELS[self.critic]
        return Workload(
            models={ACTOR: actor, ROLLOUT: actor, REFERENCE: actor, CRITIC: critic, REWARD: critic},
            prompts=PROMPTS,
            samples_per_prompt=1,
            mini_batches=UPDATES,
            prompt_tokens=float(TOKENS),
            responses=lognormal(TOKENS - 0.1, 0.0, TOKENS),
            longest_sample=2 * TOKENS,
            micro_tokens=micro_tokens,
            scores=None,
        )


# Figures 12 and 13, and for 7B and 70B what section 8.3 says of all models from 16 to 64 devices.
FINDINGS = (
    *(Finding("7B", "7B", devices, COLOCATE) for devices in (16, 32, 64)),
    *(Finding("13B", "13B", devices, COLOCATE) for devices in (16, 32, 64)),
    Finding("13B", "13B", 96, SPLIT),
    Finding("13B", "13B", 128, ALONE),
    *(Finding("34B", "34B", devices, COLOCATE) for devices in (32, 64)),
    *(Finding("34B", "34B", devices, SPLIT) for devices in (96, 128)),
    Finding("70B", "70B", 64, COLOCATE),
    Finding("13B", "70B", 64, COLOCATE),
    Finding("13B", "70B", 96, SPLIT),
    Finding("13B", "70B", 128, CRITIC_ALONE),
)


def their_cluster(devices: int) -> Cluster:
    """A100-80 nodes that share one link of 200 Gbit/s each."""
    cluster = make_cluster("A100-80", devices // NODE)
    # What a call takes beside its work is drawn.
    rates = replace(cluster.rates, call_sample_s=0.0)
    return replace(cluster, device=replace(cluster.device, between_bytes_s=NODE_BYTES_S / NODE), rates=rates)


@dataclass(frozen=True)
class Software:
    """What the paper does not say. rates: of placement/devices.py, by name; network: share of the nodes' 200 Gbit/s.

    process_gib: what a model's process holds beside its states. dispatch_s: of one call, for each device. recompute: what a
    trained model may do. The last three are the rules and the assumption above, to be left out one by one.
    """

    rates: dict[str, float]
    network: float
    micro_tokens: int
    recompute: tuple[Recompute, ...]
    process_gib: float
    dispatch_s: float
    late_critic: bool = True
    from_least: bool = True
    shards_optimizer: bool = False


@dataclass(frozen=True)
class Priced:
    """[N] layouts of one role on so many devices. state: bytes that stay on each."""

    layouts: Layouts
    state: Any
    working: Any
    score: Any
    update: Any
    gather: Any


@dataclass(frozen=True)
class PoolSeconds:
    """What a pool does in a step."""

    rollout: float
    prepare: float
    train: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.rollout + self.prepare + self.train


class Pricing:
    """Prices every placement of one finding under one set of assumptions."""

    def __init__(self, finding: Finding, software: Software) -> None:
        self._finding, self._software = finding, software
        self._work = replace(finding.workload((software.micro_tokens,)), shards_optimizer=software.shards_optimizer)
        cluster = their_cluster(finding.devices)
        rates = replace(cluster.rates, **software.rates, network=software.network)
        self.cluster = replace(cluster, rates=rates)
        self._usable = USABLE * cluster.device.memory_bytes
        self._roles: dict[tuple[bool, bool, ModelConfig, int], Priced] = {}
        self._pools: dict[tuple[Pool, int], PoolSeconds | None] = {}

    @cached_property
    def best(self) -> dict[str, tuple[float, tuple[int, ...]]]:
        """Seconds of a step and devices of each pool, of every measured placement at its best; those that fit."""
        found = {}
        for name in self._finding.measured:
            priced = ((self.seconds(PARTITIONS[name], devices), devices) for devices in self._shares(PARTITIONS[name]))
            seconds, devices = min(priced, default=(math.inf, ()))
            if seconds < math.inf:
                found[name] = seconds, devices
        return found

    def actor_share(self) -> float:
        """Share of a step that the actor trains and generates, all models together on all devices."""
        pool = self.pool(PARTITIONS[COLOCATE][0], self._finding.devices)
        assert pool is not None, self._finding
        # Actor and critic are alike but for the head.
        return (pool.rollout + pool.train / 2) / pool.total

    def _shares(self, partition: Partition) -> Iterator[tuple[int, ...]]:
        """Every way to share out all nodes."""
        nodes, pools = self._finding.devices // NODE, len(partition)
        for first in product(range(1, nodes), repeat=pools - 1):
            if sum(first) < nodes:
                yield tuple(NODE * each for each in (nodes - sum(first), *first))

    def seconds(self, partition: Partition, devices: Sequence[int]) -> float:
        """One step; infinite where it does not fit."""
        pools = [self.pool(pool, each) for pool, each in zip(partition, devices, strict=True)]
        if None in pools:
            return math.inf
        done = [pool for pool in pools if pool is not None]
        late = [self._software.late_critic and learns_late(pool) for pool in partition]
        waited = max(each.train for each, later in zip(done, late, strict=True) if not later)
        step = sum(each.rollout for each in done) + max(each.prepare for each in done) + waited
        beside = max((each.total for each, later in zip(done, late, strict=True) if later), default=0.0)
        return max(step, beside) + 3 * self.cluster.rates.barrier_s

    def pool(self, pool: Pool, devices: int) -> PoolSeconds | None:
        """The fastest layouts of the models of one pool that its memory holds; None where none does."""
        if (pool, devices) not in self._pools:
            self._pools[pool, devices] = self._price_pool(pool, devices)
        return self._pools[pool, devices]

    def _price_pool(self, pool: Pool, devices: int) -> PoolSeconds | None:
        roles = [role for role in pool if role != ROLLOUT]
        priced = [self._role(role, devices) for role in roles]
        rows = [each.ravel() for each in np.meshgrid(*(np.arange(len(each.layouts)) for each in priced), indexing="ij")]
        each = list(zip(priced, rows, strict=True))
        state = sum(p.state[row] for p, row in each)
        fits = state + np.max([p.working[row] for p, row in each], axis=0) <= self._usable
        if self._software.from_least:
            fits = fits & _from_least(np.array([(p.layouts.tp * p.layouts.pp)[row] for p, row in each]), fits)
        prepare = sum(p.score[row] for (p, row), role in zip(each, roles, strict=True) if role != ACTOR)
        train = sum(p.update[row] for (p, row), role in zip(each, roles, strict=True) if role in TRAINED)
        rollout = np.zeros(len(rows[0]))
        if ROLLOUT in pool:
            actor, row = each[roles.index(ACTOR)]
            rollout = self._rollout(self._usable - state, devices) + actor.gather[row]
        total = np.where(fits, rollout + prepare + train, np.inf)
        if not len(total) or not np.isfinite(total.min()):
            return None
        at = int(total.argmin())
        return PoolSeconds(*(float(np.broadcast_to(part, total.shape)[at]) for part in (rollout, prepare, train)))

    def _role(self, role: str, devices: int) -> Priced:
        key = (role in TRAINED, has_head(role), self._work.models[role], devices)
        if key not in self._roles:
            self._roles[key] = self._price_role(role, devices)
        return self._roles[key]

    def _price_role(self, role: str, devices: int) -> Priced:
        config, trained, software = self._work.models[role], role in TRAINED, self._software
        kinds = [RECOMPUTE.index(kind) for kind in software.recompute] if trained else [0]
        rows = [
            (devices, tp, pp, 1, 1, software.micro_tokens, kind, 1, 0, 0, ALL_LAYERS, 1, int(tp > 1))
            for tp, pp, kind in product((8,) if trained else (1, 2, 4, 8), (1, 2, 4, 8), kinds)
            if devices % (tp * pp) == 0 and devices // (tp * pp) <= PROMPTS // UPDATES
        ]
        layouts = Layouts(*np.array(rows, np.int64).reshape(-1, 13).T)
        held = held_bytes(role, layouts, self._work, self.cluster)
        call = software.dispatch_s * devices
        score = score_seconds(config, layouts, self._work, self.cluster, head=has_head(role)).total + call
        update = np.zeros(len(layouts))
        if trained:
            update = update_seconds(config, layouts, self._work, self.cluster, head=has_head(role)).total + call
        state = held.state + software.process_gib * GIB
        # Their engine gathers all that is cut before it hands over.
        total = model_sizes(config).total * self._work.bytes_each
        cut = layouts.tp * layouts.pp
        gather = total * (1 - 1 / cut) / group_bytes_s(self.cluster, cut, 1)
        return Priced(layouts, state, held.working, score, update, gather)

    def _rollout(self, room: Any, devices: int) -> Any:
        """[N] seconds of generation where so many bytes of each device are left for its weights and cache."""
        config, tp = self._work.models[ROLLOUT], GENERATION_TP[self._finding.actor]
        servers = devices // tp
        cache = room - model_sizes(config).total * self._work.bytes_each / tp
        holds = np.floor(cache / kv_bytes(config, np.array(tp), self._work.bytes_each) / (2 * TOKENS))
        each = math.ceil(PROMPTS / servers)
        waves = np.ceil(each / np.clip(holds, 1, each))
        step = step_model(self._work, self.cluster, tp, servers)
        decode = waves * TOKENS * step(each / waves, TOKENS * 1.5)
        fixed = prefill_seconds(config, devices, tp, self._work, self.cluster) + self.cluster.rates.wake_s
        fixed += model_sizes(config).total * self._work.bytes_each / COPY_BYTES_S + self._software.dispatch_s * devices
        return np.where(holds >= 1, decode + fixed, np.inf)


def _from_least(sizes: Any, fits: Any) -> Any:
    """[N] whether all models are cut at least as often as the fewest times that all can be cut alike and fit.

    sizes: [models, N] of model parallel.
    """
    alike = sizes[0][fits & (sizes == sizes[0]).all(axis=0)]
    return sizes.min(axis=0) >= alike.min(initial=np.iinfo(np.int64).max)


@dataclass(frozen=True)
class Outcome:
    """agree: findings reproduced. missed: the others by index, with the winner's predicted time over the pick's."""

    agree: int
    missed: dict[int, float]
    best: tuple[dict[str, tuple[float, tuple[int, ...]]], ...]

    @property
    def loss(self) -> float:
        """0 where all are reproduced."""
        return sum(math.log(min(ratio, 3.0)) + 0.01 for ratio in self.missed.values())


def outcome(software: Software, findings: Sequence[Finding] = FINDINGS) -> Outcome:
    """Which findings a set of assumptions reproduces."""
    missed, best = {}, []
    for index, finding in enumerate(findings):
        found = Pricing(finding, software).best
        best.append(found)
        least = min((seconds for seconds, _ in found.values()), default=math.inf)
        mine = found.get(finding.winner, (math.inf, ()))[0]
        if mine > least or least == math.inf:
            missed[index] = mine / least if least < math.inf else math.inf
    return Outcome(len(findings) - len(missed), missed, tuple(best))
