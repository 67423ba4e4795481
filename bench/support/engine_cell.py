"""One cell of bench/gpu_engine: a role of one rank on one device, its updates, log-probs and way to the host, phase by phase."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.core.layout import Layout
from megarl.core.platform import Platform, finish_copies, held_bytes
from megarl.core.types import Column, Shard
from megarl.models.config import ModelConfig
from megarl.models.flops import forward_flops, recompute_flops, train_flops
from megarl.models.known_configs import FOLDER
from megarl.placement.devices import Kernels
from megarl.placement.memory import Role, RoleBytes, role_bytes
from megarl.placement.space import one_layout
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.roles import Optimizer
from megarl.recipe.section import Recompute
from megarl.training.manifest import read_model_config
from megarl.training.rank import Rank
from megarl.training.spec import PolicyObjective, RoleSpec
from tests.training.samples import examples, shards

ROLE = "engine"
SHARE = 0.9  # of the device, which a plan may fill: the rest is CUDA's, its libraries' and fragments
# Micro-batches of a small and a large update, whose difference is theirs alone; of LONG ones fewer, to end in time.
SMALL, LARGE, LONG, FEWER = 4, 8, 16384, 2
REPEATS = 2  # that count, of which the fastest does
# What differs from Qwen3-4B's config.json.
SIZES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "tiny": {
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256},
    },
}


@dataclass(frozen=True)
class Cell:
    """One process. kind: peak (of products and copies) or engine. fused: Transformer Engine's layers.

    mixed: no two sequences of all its passes are equally long (in large shapes), so that what is chosen anew for each length is
    seen; an even number of sequences.
    """

    kind: str
    model: str = ""
    tokens: int = 0
    sequences: int = 1
    fused: bool = False
    mixed: bool = False


def device_bytes(platform: Platform) -> int:
    """Of the whole device; of a CPU what its machine has."""
    if platform.has_device_memory:
        import torch

        return int(torch.cuda.mem_get_info()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def allocator(platform: Platform) -> dict[str, Any]:
    """Bytes of a device that no plan can derive: beside torch's, and what torch takes for what it is asked for since a reset.

    Nobody else may be on the device. retries: how often torch found no room before it gave back what it had cached.
    """
    if not platform.has_device_memory:
        return {}
    import torch

    free, total = torch.cuda.mem_get_info()
    taken, asked = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    return {
        "allocator": {
            "beside_torch_bytes": total - free - torch.cuda.memory_reserved(),
            "taken_bytes": taken,
            "asked_bytes": asked,
            "fragmentation": 1 - asked / max(taken, 1),
            "retries": int(torch.cuda.memory_stats().get("num_alloc_retries", 0)),
        }
    }


def planned(config: ModelConfig, cell: Cell, recompute: Recompute, platform: Platform, *, trained: bool) -> RoleBytes:
    """What the planner says that the role holds."""
    kernels = Kernels(
        fused=cell.fused,
        chunk_elements=platform.chunk_elements,
        sums_in_copies=platform.backend == "gloo",
    )
    role = Role(trained=trained, head=True, sequence=cell.tokens // cell.sequences)
    return role_bytes(config, one_layout(Layout(), cell.tokens, recompute), 2, role, kernels)


def most_bytes(config: ModelConfig, cell: Cell, recompute: Recompute, platform: Platform) -> float:
    """What the planner says of the fullest moment: of training, or of scoring while the trained role's state stays."""
    training, scoring = (planned(config, cell, recompute, platform, trained=trained) for trained in (True, False))
    return float(training.state[0] + max(training.working[0], scoring.working[0]))


def fitted(config: ModelConfig, cell: Cell, platform: Platform) -> tuple[ModelConfig, Recompute]:
    """As many layers as the plan fits into the device, without recompute where at least half of them stay; else with it."""
    room = SHARE * device_bytes(platform)
    modes: tuple[tuple[Recompute, int], ...] = (("none", config.num_layers // 2), ("full", 1))
    for recompute, fewest in modes:
        for layers in range(config.num_layers, fewest - 1, -1):
            cut = replace(config, num_layers=layers)
            if most_bytes(cut, cell, recompute, platform) <= room:
                return cut, recompute
    return replace(config, num_layers=1), "full"


def write_config(folder: Path, cell: Cell, layers: int | None = None) -> ModelConfig:
    """A folder with the config.json alone."""
    settings = json.loads((FOLDER / "Qwen/Qwen3-4B/config.json").read_text()) | SIZES[cell.model]
    if layers is not None:
        settings["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(settings))
    return read_model_config(folder)


def run_engine(cell: Cell, platform: Platform) -> Iterator[dict[str, Any]]:
    """Updates, log-probs, for short cells the way to the host and back, and bytes by phase beside the plan's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = write_config(folder, cell)
        cut, recompute = fitted(whole, cell, platform)
        config = write_config(folder, cell, cut.num_layers)
        yield {"layers": config.num_layers, "of": whole.num_layers, "recompute": recompute}
        rank = Rank(0, 1, platform.name, seed=1)
        rank.platform = replace(rank.platform, has_transformer_engine=cell.fused)
        rank.rendezvous("127.0.0.1", rank.free_port(), timeout_s=60)
        try:
            before = held_bytes(platform)
            spec = RoleSpec(
                folder,
                "bfloat16",
                optimizer=Optimizer(lr=1e-6),
                total_steps=100,
                objective=PolicyObjective(Algorithm()),
                recompute=recompute,
                load_weights=False,
            )
            rank.build(ROLE, spec)
            _fill(rank)
            yield from Phases(rank, config, cell, recompute, platform, before).run()
        finally:
            rank.close()


def _fill(rank: Rank) -> None:
    """Random weights, made where they lie."""
    import torch

    engine: Any = rank.engine(ROLE)
    torch.manual_seed(1)
    with torch.no_grad():
        for chunk in engine._chunks:
            for parameter in chunk.parameters():
                parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(std=0.02)
    engine._stepper.optimizer.reload_model_params()


def lengths(cell: Cell, numbers: range) -> list[int]:
    """Of the sequences of micro-batches of these numbers, as `shards` deals them: each micro-batch has the cell's tokens."""
    each = cell.tokens // cell.sequences
    if not cell.mixed:
        return [each] * (cell.sequences * len(numbers))
    pairs = cell.sequences // 2
    by = [[1 + (number * pairs + pair) % (each - 1) for number in numbers] for pair in range(pairs)]
    return [each + sign * other for row in by for sign in (1, -1) for other in row]


@dataclass
class Phases:
    """What is done with a role that is built. before: bytes that were held without it. used: micro-batches so far."""

    rank: Rank
    config: ModelConfig
    cell: Cell
    recompute: Recompute
    platform: Platform
    before: int
    used: int = 0

    def run(self) -> Iterator[dict[str, Any]]:
        """Figures, a dict after each phase; a later one may say more of the same name."""
        training, scoring = (
            planned(self.config, self.cell, self.recompute, self.platform, trained=trained) for trained in (True, False)
        )
        self.rank.take_peaks()
        yield from self._updates()
        state = held_bytes(self.platform) - self.before
        held = {
            "state": _pair(state, training.state),
            "update peak": _pair(self._peak("update"), training.state + training.working),
        }
        yield {"bytes": held} | allocator(self.platform)
        yield self._logprobs()
        # The trained role's state stays while it scores.
        scored = _pair(self._peak("logprobs"), training.state + scoring.working)
        yield {"bytes": held | {"log-prob peak": scored}}
        # Once for a state: the host's memory is slow to lock, and one that is soon full is not filled for nothing.
        if not self.cell.mixed and self.cell.tokens < LONG:
            yield _offload(self.rank, self.platform)

    def _updates(self) -> Iterator[dict[str, Any]]:
        fewer = FEWER if self.cell.tokens >= LONG else 1
        few, many = SMALL // fewer, LARGE // fewer
        (first, *again), of_few = self._timed(self._update, few, 1 + REPEATS)
        small = min(again)
        yield {
            "first_update_s": first,
            "update_s": small,
            "micro_batches_of_update": few,
            "tokens_of_update": sum(of_few),
        }
        taken, of_many = self._timed(self._update, many, REPEATS)
        each = (min(taken) - small) / (many - few)
        found: dict[str, Any] = {"larger_update_s": min(taken), "micro_batch_s": each, "step_s": small - few * each}
        if each > 0:  # else the clock's noise is larger than a micro-batch, as with tiny shapes
            flops = train_flops(self.config, of_many) - train_flops(self.config, of_few)
            again_flops = [recompute_flops(self.config, these, self.recompute) for these in (of_many, of_few)]
            found["update_flops_s"] = flops / (many - few) / each
            found["update_flops_s_with_recompute"] = (flops + again_flops[0] - again_flops[1]) / (many - few) / each
        yield found

    def _logprobs(self) -> dict[str, Any]:
        count = SMALL // (FEWER if self.cell.tokens >= LONG else 1)
        taken, scored = self._timed(lambda shard, _: self.rank.logprobs(ROLE, shard), count, 1 + REPEATS)
        fastest = min(taken[1:])
        return {"logprobs_s": fastest, "logprobs_flops_s": forward_flops(self.config, scored).total / fastest}

    def _update(self, shard: Shard, columns: dict[str, Column]) -> object:
        return self.rank.update(ROLE, shard, columns)

    def _timed(
        self, work: Callable[[Shard, dict[str, Column]], object], count: int, calls: int
    ) -> tuple[list[float], list[int]]:
        """Seconds of each call with so many micro-batches, none of which was there before; the last one's lengths."""
        taken, these = [], []
        for _ in range(calls):
            these = lengths(self.cell, range(self.used, self.used + count))
            self.used += count
            made = examples(these, self.config.vocab_size, taught=False)
            [shard], [columns] = shards([made], 1, count)
            finish_copies(self.platform)
            began = time.perf_counter()
            work(shard, columns)
            finish_copies(self.platform)
            taken.append(time.perf_counter() - began)
        return taken, these

    def _peak(self, operation: str) -> int:
        return self.rank.take_peaks()[f"{ROLE}/{operation}"] - self.before


def _pair(measured: float, said: Any) -> dict[str, float]:
    return {"measured": float(measured), "planned": float(said[0]), "error": float(said[0]) / max(measured, 1) - 1}


def _offload(rank: Rank, platform: Platform) -> dict[str, Any]:
    """Everything of the role to the host and back; the second time counts, when its memory there has been taken."""
    for _ in range(2):
        finish_copies(platform)
        began = time.perf_counter()
        freed = rank.sleep(ROLE, ("params", "optimizer"))
        finish_copies(platform)
        slept = time.perf_counter()
        left = held_bytes(platform)
        taken = rank.wake(ROLE, ("params", "optimizer"))
        finish_copies(platform)
        woken = time.perf_counter()
    return {
        "offload": {
            "bytes": freed,
            "to_host_bytes_s": freed / (slept - began),
            "from_host_bytes_s": taken / (woken - slept),
            "left_bytes": left,
        }
    }
