"""How well the planner's models agree with measurements that others published. One command:

    python bench/plan_published.py            # predictions with the rates in the table of devices
    python bench/plan_published.py --fit      # also: fits the rates anew, on the calibration rows alone

Rows are in bench/published/rows.csv: Megatron with vLLM on H100, from ISEEKYAN/verl_megatron_practice (Apache-2.0). Every
second row of a family is for calibration, the others are held out. Average lengths were not published: each family's mean
and spread are inferred from its calibration rows. Rows with a fixed micro-batch (not packed) do not say its size: they
are used for memory verdicts alone.

bench/published/nemo_rl.csv has rows of NVIDIA-NeMo/RL v0.6 (docs/about/performance-summary.md, Apache-2.0): whole steps of GRPO
on DGX H100. Nothing is fitted to them. Published are the layouts and the mean length of a whole sample; that prompts have 150
tokens of it, and how devices are shared out where generation runs ahead, is not: the search shares them out.
"""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megarl.models.config import ModelConfig, Moe, Rope
from megarl.placement.cluster import Cluster, make_cluster
from megarl.placement.compute import score_seconds, update_seconds
from megarl.placement.devices import GIB
from megarl.placement.generation import rollout_seconds
from megarl.placement.lengths import lognormal
from megarl.placement.memory import role_bytes, server_bytes
from megarl.placement.partitions import Partition
from megarl.placement.plan import make_plan
from megarl.placement.space import RECOMPUTE, Layouts, Servers, Space
from megarl.placement.workload import ACTOR, REFERENCE, ROLLOUT, Workload

FOLDER = Path(__file__).parent
ROWS = FOLDER / "published" / "rows.csv"
NEMO_ROWS = FOLDER / "published" / "nemo_rl.csv"
RESULT = FOLDER / "results" / "plan_published.json"
NEMO_SAMPLES = 32
PROMPT_TOKENS, LONGEST_PROMPT, LONGEST_RESPONSE, SAMPLES = 150.0, 2048, 8192, 16
QUANTITIES = ("generation_s", "update_s", "score_s", "step_s")
FITTED = (
    "matmul",
    "experts",
    "half_tokens",
    "half_expert_tokens",
    "layer_s",
    "expert_layer_s",
    "decode_layer_s",
    "decode_expert_layer_s",
    "decode_s",
    "update_s",
    "barrier_s",
)


def _config(layers: int, hidden: int, heads: int, ffn: int, vocab: int, head_dim: int, moe: Moe | None) -> ModelConfig:
    return ModelConfig(
        family="qwen",
        architecture="",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=4,
        head_dim=head_dim,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
        max_positions=32768,
        rope=Rope(1e6),
        norm_eps=1e-6,
        tied_embeddings=False,
        qkv_bias=True,
        qk_norm=False,
        eos_token_ids=(0,),
        moe=moe,
        moe_layers=frozenset(range(layers)) if moe else frozenset(),
    )


QWEN_7B = _config(28, 3584, 28, 18944, 152064, 128, None)
QWEN_30B_A3B = _config(48, 2048, 32, 6144, 151936, 128, Moe(128, 8, 768))
MODELS = {"dapo-7b": QWEN_7B, "grpo-7b": QWEN_7B, "dapo-30b": QWEN_30B_A3B}


@dataclass(frozen=True)
class Lens:
    """What is inferred of a family: mean and spread of its responses."""

    mean: float
    spread: float


LENSES = {"dapo-7b": Lens(1500, 0.456), "grpo-7b": Lens(622, 0.653), "dapo-30b": Lens(1555, 1.464)}
# Their trainer's own time between stages (rewards, data, logging), inferred like the lengths.
BARRIER_S = 5.26


@dataclass(frozen=True)
class Row:
    """One published row, and how its workload looks."""

    values: dict[str, str]
    calibrates: bool

    def number(self, name: str) -> float:
        return float(self.values[name] or "nan")

    def layout(self, micro: str) -> Layouts:
        names = ("devices", "tp", "pp", "cp", "ep")
        sizes = [int(self.values[name]) for name in names]
        tokens = int(self.number(micro)) if self.values[micro] else 10240
        # Published of one device; ours are of one data-parallel rank, and hold the longest sample.
        sizes += [max(tokens * int(self.values["cp"]), 10240), [*RECOMPUTE].index(self.values["recompute"])]  # type: ignore[arg-type]
        return Layouts(*(np.array([size]) for size in sizes))

    def workload(self, lens: Lens) -> Workload:
        config = MODELS[self.values["family"]]
        return Workload(
            models={ACTOR: config, ROLLOUT: config},
            prompts=512,
            samples_per_prompt=SAMPLES,
            mini_batches=512 // int(self.values["mini_prompts"]),
            prompt_tokens=PROMPT_TOKENS,
            responses=lognormal(lens.mean, lens.spread, LONGEST_RESPONSE),
            longest_sample=LONGEST_PROMPT + LONGEST_RESPONSE,
            micro_tokens=(),
            max_running=256,
        )

    def servers(self) -> Servers:
        return Servers(
            np.array([int(self.values["devices"])]),
            np.array([int(self.values["server_tp"])]),
            np.array([self.number("memory_share")]),
            np.array([int(self.values["devices"])]),
        )


def read_rows() -> list[Row]:
    with ROWS.open() as file:
        values = list(csv.DictReader(file))
    seen: dict[str, int] = {}
    rows = []
    for each in values:
        timed = each["packed"] == "1" and each["oom"] == "0"
        index = seen[each["family"]] = seen.get(each["family"], -1) + timed
        rows.append(Row(each, timed and index % 2 == 0))
    return rows


def predict(row: Row, cluster: Cluster, lens: Lens) -> dict[str, float]:
    work, config = row.workload(lens), MODELS[row.values["family"]]
    one = row.servers()
    rollout = float(rollout_seconds(config, one, server_bytes(config, one, cluster, 2), work, cluster).total[0])
    update = float(update_seconds(config, row.layout("update_micro_tokens"), work, cluster).total[0])
    score = float(score_seconds(config, row.layout("score_micro_tokens"), work, cluster).total[0])
    rest = 3 * cluster.rates.barrier_s
    return {"generation_s": rollout, "update_s": update, "score_s": score, "step_s": rollout + update + score + rest}


def fits(row: Row, cluster: Cluster) -> tuple[bool, float]:
    """Whether a row's roles fit: actor and reference beside the awake servers, then the update with servers asleep."""
    config = MODELS[row.values["family"]]
    actor = role_bytes(config, row.layout("update_micro_tokens"), 2, trained=True, head=True)
    reference = role_bytes(config, row.layout("score_micro_tokens"), 2, trained=False, head=True).weights[0]
    awake = row.number("memory_share") * cluster.device.memory_bytes
    offload = row.values["offload"] == "1"
    generating = awake + (0 if offload else actor.state[0] + reference)
    training = actor.state[0] + actor.working[0] + cluster.rates.resting_bytes + (0 if offload else reference)
    most = max(float(generating), float(training))
    return most <= cluster.usable_bytes, most


def cluster_of(row: Row, base: Cluster) -> Cluster:
    return base.of_nodes(max(1, int(row.values["devices"]) // 8))


def errors(rows: list[Row], base: Cluster, lenses: dict[str, Lens]) -> list[tuple[Row, str, float, float]]:
    found = []
    for row in rows:
        predicted = predict(row, cluster_of(row, base), lenses[row.values["family"]])
        for name in QUANTITIES:
            if row.values[name]:
                found.append((row, name, predicted[name], row.number(name)))
    return found


def fit(rows: list[Row], base: Cluster, lenses: dict[str, Lens], rounds: int) -> tuple[Cluster, dict[str, Lens]]:
    """Coordinate descent on mean |log error| over the calibration rows."""

    def loss(cluster: Cluster, lens: dict[str, Lens]) -> float:
        return float(np.mean([abs(np.log(max(p, 1e-9) / m)) for _, _, p, m in errors(rows, cluster, lens)]))

    best = loss(base, lenses)
    names = [(name, "") for name in FITTED] + [(family, field) for family in lenses for field in ("mean", "spread")]
    for turn in range(rounds):
        for name, field in names:
            for factor in (1 - 0.3 / (1 + turn * 0.7), 1 + 0.5 / (1 + turn * 0.7)):
                cluster = base if field else _rate(base, name, factor)
                lens = _lens(lenses, name, field, factor) if field else lenses
                if (value := loss(cluster, lens)) < best - 1e-6:
                    best, base, lenses = value, cluster, lens
    return base, lenses


def _rate(base: Cluster, name: str, factor: float) -> Cluster:
    value = getattr(base.rates, name) * factor
    value = min(value, 0.85) if name in ("matmul", "experts") else value
    return replace(base, rates=replace(base.rates, **{name: value}))


def _lens(lenses: dict[str, Lens], family: str, field: str, factor: float) -> dict[str, Lens]:
    old = lenses[family]
    value = min(getattr(old, field) * factor, 3.0 if field == "spread" else 4000.0)
    return {**lenses, family: replace(old, **{field: value})}


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    ranks = [np.argsort(np.argsort(values)).astype(float) for values in zip(*pairs, strict=True)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def nemo_rl() -> list[dict[str, object]]:
    """Whole steps of NeMo-RL, predicted with its layouts."""
    found = []
    with NEMO_ROWS.open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        longest = int(row["train_max_seq_len"])
        responses = lognormal(float(row["avg_seq_len"]) - PROMPT_TOKENS, 0.5, longest - PROMPT_TOKENS)
        staleness = 0 if row["policy"] == "on" else int(row["policy"].split("-")[0])
        work = Workload(
            models={ACTOR: QWEN_30B_A3B, ROLLOUT: QWEN_30B_A3B, REFERENCE: QWEN_30B_A3B},
            prompts=int(row["gen_gbs"]) // NEMO_SAMPLES,
            samples_per_prompt=NEMO_SAMPLES,
            mini_batches=int(row["gen_gbs"]) // int(row["train_gbs"]),
            prompt_tokens=PROMPT_TOKENS,
            responses=responses,
            longest_sample=longest,
            micro_tokens=(longest, 2 * longest),
            max_running=256,
            staleness=staleness,
        )
        space = Space(
            tp=tuple({int(row["train_tp"]), int(row["gen_tp"])}),
            pp=(int(row["train_pp"]),),
            cp=(int(row["train_cp"]),),
            ep=(int(row["train_ep"]),),
        )
        cluster = make_cluster("H100", int(row["num_gpus"]) // 8)
        apart = {frozenset({ROLLOUT}), frozenset({ACTOR, REFERENCE})}

        def runs(partition: Partition, apart: set[frozenset[str]] = apart, staleness: int = staleness) -> bool:
            return set(map(frozenset, partition)) == apart if staleness else len(partition) == 1

        best = make_plan(work, cluster, space=space, allowed=runs).best
        line = {"row": f"{row['policy']} policy, {row['num_gpus']} devices", "placement": best.describe()}
        found.append({**line, "predicted_s": best.step_s, "measured_s": float(row["step_s"])})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    rows, base, lenses = read_rows(), make_cluster("H100", 1), dict(LENSES)
    base = replace(base, rates=replace(base.rates, barrier_s=BARRIER_S))
    timed = [row for row in rows if row.values["packed"] == "1" and row.values["oom"] == "0"]
    if options.fit:
        base, lenses = fit([row for row in timed if row.calibrates], base, lenses, options.rounds)
        print({name: float(f"{getattr(base.rates, name):.4g}") for name in FITTED}, lenses)
    result: dict[str, object] = {}
    for title, some in (
        ("calibration", [r for r in timed if r.calibrates]),
        ("held out", [r for r in timed if not r.calibrates]),
    ):
        found = errors(some, base, lenses)
        for name in (*QUANTITIES, "all"):
            mine = [(p, m) for _, n, p, m in found if name in (n, "all")]
            off = [abs(p / m - 1) for p, m in mine]
            line = {
                "rows": len(mine),
                "median_error": float(np.median(off)),
                "rank_correlation": rank_correlation(mine),
            }
            result[f"{title}: {name}"] = line
            print(f"{title:12} {name:14} {line}")
    print("\n| row | quantity | predicted | measured | error | |\n|---|---|---|---|---|---|")
    for row, name, p, m in errors(timed, base, lenses):
        use = "calibration" if row.calibrates else "held out"
        print(
            f"| {row.values['family']} {row.values['number']} | {name} | {p:.1f} | {m:g} | {p / m - 1:+.0%} | {use} |"
        )
    verdicts = []
    for row in rows:
        if row.values["family"] == "grpo-7b":
            ok, most = fits(row, cluster_of(row, base))
            verdicts.append(
                {"row": row.values["number"], "fits": ok, "published": row.values["oom"] == "0", "gib": most / GIB}
            )
    right = sum(verdict["fits"] == verdict["published"] for verdict in verdicts)
    print(f"\nmemory verdicts right: {right} of {len(verdicts)} (usable {base.usable_bytes / GIB:.1f} GiB)")
    for verdict in verdicts:
        print(verdict)
    steps = nemo_rl()
    for line in steps:
        print(line)
    RESULT.write_text(json.dumps({"summary": result, "memory": verdicts, "nemo_rl": steps}, indent=1))


if __name__ == "__main__":
    main()
