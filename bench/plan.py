"""The placement search: how long it takes, and whether it finds what HybridFlow found. One command:

    python bench/plan.py

Speed: PPO with five 7B roles, tables and search together, in a process with one thread; medians of five. On a busy
machine cpu_s, the processor time, is the fairer of the two.
HybridFlow (arXiv 2409.19256v2, figures 9 to 13): Llama on A100-80 nodes of 8 with 200 Gbit/s between nodes (section 8.1; an
eighth of it for each device), prompts and responses of 1,024 tokens, 1,024 prompts, 8 updates; there actor and rollout always
share their devices, so only such placements are compared here.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from dataclasses import replace
from pathlib import Path

from megarl.models.config import ModelConfig, Rope
from megarl.placement.cluster import Cluster, make_cluster
from megarl.placement.lengths import lognormal
from megarl.placement.partitions import Partition
from megarl.placement.search import Found, Result, search
from megarl.placement.tables import build_tables
from megarl.placement.workload import ACTOR, CRITIC, REFERENCE, REWARD, ROLLOUT, Workload

RESULT = Path(__file__).parent / "results" / "plan.json"
LIMITS_S = {16: 0.2, 128: 0.2, 1024: 2.0, 16384: 20.0}
NODE_BYTES_S = 200e9 / 8
COLOCATE, SPLIT, ALONE = "colocate", "split", "standalone"
# Devices -> winner, by model.
FINDINGS = {
    "7B": {16: COLOCATE, 32: COLOCATE, 64: COLOCATE},
    "13B": {16: COLOCATE, 32: COLOCATE, 64: COLOCATE, 96: SPLIT, 128: ALONE},
    "34B": {32: COLOCATE, 64: COLOCATE, 96: SPLIT, 128: SPLIT},
    "70B": {64: COLOCATE},
    "13B, critic and reward 70B": {64: COLOCATE, 96: SPLIT, 128: "actor+rollout+reference+reward | critic"},
}
PARTITIONS: dict[str, Partition] = {
    COLOCATE: ((ACTOR, ROLLOUT, REFERENCE, CRITIC, REWARD),),
    SPLIT: ((ACTOR, ROLLOUT, REFERENCE), (CRITIC, REWARD)),
    ALONE: ((ACTOR, ROLLOUT), (REFERENCE,), (CRITIC,), (REWARD,)),
    "actor+rollout+reference+reward | critic": ((ACTOR, ROLLOUT, REFERENCE, REWARD), (CRITIC,)),
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


def workload(actor: ModelConfig, critic: ModelConfig) -> Workload:
    models = {ACTOR: actor, ROLLOUT: actor, REFERENCE: actor, CRITIC: critic, REWARD: critic}
    return Workload(
        models=models,
        prompts=1024,
        samples_per_prompt=1,
        mini_batches=8,
        prompt_tokens=1024.0,
        responses=lognormal(1023.9, 0.0, 1024),
        longest_sample=2048,
        micro_tokens=(2048, 4096, 8192, 16384),
    )


def their_cluster(devices: int) -> Cluster:
    """A100-80 nodes that share one link of 200 Gbit/s each."""
    cluster = make_cluster("A100-80", devices // 8)
    return replace(cluster, device=replace(cluster.device, between_bytes_s=NODE_BYTES_S / 8))


def look(work: Workload, cluster: Cluster, only: set[frozenset[str]] | None = None, top: int = 5) -> Result:
    devices = cluster.num_devices

    def allowed(partition: Partition) -> bool:
        return only is None or {frozenset(pool) for pool in partition} == only

    tables = build_tables(work, cluster).searched(asynchronous=False)
    return search(tables, devices=devices, usable=cluster.usable_bytes, top=top, allowed=allowed)


def speed() -> list[dict[str, float]]:
    lines = []
    for devices, limit in LIMITS_S.items():
        seconds, busy = [], []
        for _ in range(5):
            start, start_busy = time.perf_counter(), time.process_time()
            look(workload(MODELS["7B"], MODELS["7B"]), make_cluster("A100-80", devices // 8))
            seconds.append(time.perf_counter() - start)
            busy.append(time.process_time() - start_busy)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        line = {"devices": devices, "seconds": statistics.median(seconds), "cpu_s": statistics.median(busy)}
        lines.append({**line, "limit_s": limit, "peak_mib": peak})
        print({name: round(value, 3) for name, value in lines[-1].items()}, flush=True)
    return lines


def _words(found: Found) -> str:
    return " | ".join(f"{'+'.join(p)} {d}" for p, d in zip(found.partition, found.devices, strict=True))


def findings() -> list[dict[str, object]]:
    lines: list[dict[str, object]] = []
    for model, cases in FINDINGS.items():
        actor, critic = MODELS[model.split(",")[0]], MODELS["70B" if "70B" in model else model]
        for devices, expected in cases.items():
            work = workload(actor, critic)
            seconds: dict[str, float] = {}
            words = {}
            for name, partition in PARTITIONS.items():
                found = look(work, their_cluster(devices), {frozenset(pool) for pool in partition}, top=1).found
                if found:
                    seconds[name], words[name] = found[0].seconds, _words(found[0])
            winner = min(seconds, key=lambda name: seconds[name])
            best = look(work, their_cluster(devices), top=1).found[0]
            line = {
                "model": model,
                "devices": devices,
                "published": expected,
                "picked": winner,
                "agrees": winner == expected,
                "seconds": {name: round(value, 1) for name, value in seconds.items()},
                "published_over_picked": round(seconds.get(expected, float("inf")) / seconds[winner], 3),
                "best_of_all": f"{_words(best)}: {best.seconds:.1f} s",
            }
            lines.append(line)
            print(line, flush=True)
    print(f"agrees in {sum(bool(line['agrees']) for line in lines)} of {len(lines)}")
    return lines


def main() -> None:
    RESULT.write_text(json.dumps({"speed": speed(), "hybridflow": findings()}, indent=1))


if __name__ == "__main__":
    main()
