"""Whether other rates than ours would find what HybridFlow found. One command:

    python -m bench.plan_rates --draws 2000

`bench/plan.py` reproduces most of HybridFlow's winners with the rates of our table, and misses a few. Their software was
another: this draws rates, network and layouts at random from wide ranges (RANGES), most of the time a step away from the best
set so far, and counts the winners that each set reproduces. It is a search for an explanation, not a calibration: nothing of
it goes into the planner. Same seed, same draws. The most that was found, and the findings that it misses, are written down.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.plan import FINDINGS, MODELS, NODE_BYTES_S, PARTITIONS, their_cluster, workload
from megarl.placement.search import search
from megarl.placement.space import Space
from megarl.placement.tables import build_tables

RESULT = Path(__file__).parent / "results" / "plan_rates.json"
NAMES = {frozenset(map(frozenset, partition)): name for name, partition in PARTITIONS.items()}
# Lowest and highest of each rate (placement/devices.py says what they are), drawn evenly on a logarithmic scale.
RANGES = {
    "matmul": (0.3, 0.6),
    "half_tokens": (100.0, 8000.0),
    "layer_s": (1e-4, 5e-3),
    "hop_s": (1e-5, 5e-3),
    "update_s": (0.02, 3.0),
    "barrier_s": (0.5, 5.0),
    "call_s": (0.01, 10.0),
    "decode_layer_s": (4e-5, 6e-4),
    "memory": (0.3, 0.85),
    "links": (0.4, 0.85),
    "wake_s": (0.1, 6.0),
}
NETWORK = (0.2, 4.0)  # of an eighth of 200 Gbit/s for each device
MICRO_TOKENS = ((2048,), (4096,), (8192,), (2048, 4096, 8192, 16384))
SPACES = {
    "all": Space(),
    "pp up to 4": Space(pp=(1, 2, 4)),
    "tp 8": Space(tp=(8,)),
    "tp 8, pp up to 8": Space(tp=(8,), pp=(1, 2, 4, 8)),
    "tp 8, pp up to 2": Space(tp=(8,), pp=(1, 2)),
}
STEPS_FROM_BEST = 0.7


@dataclass(frozen=True)
class Assumed:
    """One set of what their software and network may have been."""

    rates: dict[str, float]
    network: float
    micro_tokens: tuple[int, ...]
    space: str


@dataclass(frozen=True)
class Outcome:
    """agree: findings reproduced. missed: the others, with the predicted time of the published winner over the pick's."""

    agree: int
    missed: dict[str, float]

    @property
    def rank(self) -> tuple[int, float]:
        """Larger is better."""
        return self.agree, -sum(self.missed.values())


def draw(random_: random.Random) -> Assumed:
    def between(low: float, high: float) -> float:
        return math.exp(random_.uniform(math.log(low), math.log(high)))

    rates = {name: between(*bounds) for name, bounds in RANGES.items()} | {"network": 1.0}
    return Assumed(rates, between(*NETWORK), random_.choice(MICRO_TOKENS), random_.choice([*SPACES]))


def step(random_: random.Random, best: Assumed) -> Assumed:
    """Two rates drawn anew, and now and then one of the others."""
    new = draw(random_)
    rates = best.rates | {name: new.rates[name] for name in random_.sample([*RANGES], 2)}
    kept = {name: random_.random() > 0.3 for name in ("network", "micro_tokens", "space")}
    return replace(new, rates=rates, **{name: getattr(best, name) for name, keeps in kept.items() if keeps})


def outcome(assumed: Assumed) -> Outcome:
    agree, missed = 0, {}
    for model, cases in FINDINGS.items():
        work = replace(
            workload(MODELS[model.split(",")[0]], MODELS["70B" if "70B" in model else model]),
            micro_tokens=assumed.micro_tokens,
        )
        for devices, winner in cases.items():
            cluster = their_cluster(devices)
            device = replace(cluster.device, between_bytes_s=NODE_BYTES_S / 8 * assumed.network)
            cluster = replace(cluster, device=device, rates=replace(cluster.rates, **assumed.rates))
            found = search(
                build_tables(work, cluster, SPACES[assumed.space]).searched(asynchronous=False),
                devices=devices,
                usable=cluster.usable_bytes,
                top=len(NAMES),
                allowed=lambda partition: frozenset(map(frozenset, partition)) in NAMES,
            ).found
            seconds = {NAMES[frozenset(map(frozenset, each.partition))]: each.seconds for each in found}
            if seconds and min(seconds, key=lambda name: seconds[name]) == winner:
                agree += 1
            else:
                missed[f"{model} on {devices}"] = seconds.get(winner, math.inf) / min(seconds.values(), default=1.0)
    return Outcome(agree, missed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    random_ = random.Random(options.seed)
    best: tuple[Outcome, Assumed] | None = None
    counts: Counter[int] = Counter()
    reproduced: Counter[str] = Counter()
    names = [f"{model} on {devices}" for model, cases in FINDINGS.items() for devices in cases]
    for index in range(options.draws):
        near = best is not None and random_.random() < STEPS_FROM_BEST
        assumed = step(random_, best[1]) if best and near else draw(random_)
        found = outcome(assumed)
        counts[found.agree] += 1
        reproduced.update(name for name in names if name not in found.missed)
        if best is None or found.rank > best[0].rank:
            best = found, assumed
            print(f"{index + 1} of {options.draws}: {found.agree} of {len(names)}; missed {found.missed}", flush=True)
        elif sys.stderr.isatty():
            print(f"\r{index + 1} of {options.draws}", end="", file=sys.stderr, flush=True)
    assert best is not None
    result = {
        "draws": options.draws,
        "most": best[0].agree,
        "of": len(names),
        "missed": best[0].missed,
        "assumed": asdict(best[1]),
        "draws_by_number_reproduced": dict(sorted(counts.items())),
        "draws_that_reproduce": {name: reproduced[name] for name in names},
    }
    print(json.dumps(result, indent=1))
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
