"""The published rows of bench/published/rows.csv as workloads, and what the planner's models say of them.

Assumed of all: 16 samples a prompt (the sum of tokens that some rows publish agrees), prompts of 159 tokens (the same sum, less
the responses that they publish), 1,024 running sequences a server and, where a row does not say, servers with 0.8 of the memory
(what these recipes say in verl's repository).

Lengths: where a row has its throughput, the tokens of a sample are known. Else they follow from the MFU, which is the model's
operations by verl's formula over seconds: it counts seconds inside of a worker only, so that the least of a family is taken; on
H20 each row's own, for lengths differed between rows. Generation, scores and steps are not part of that, an update is.

`counts` is False where a row is shown but not among the errors: FSDP is another engine (its generation counts); kernels of RoPE
that are not fused, which megarl does not use; rows with a fixed micro-batch, which they do not say the size of; generation of
14B under FSDP, where 512 prompts were trained on and three times as many are generated for: that is inferred, from recipes of
this kind, which generate so, and from seconds that are three times those of the other rows.
Nor are the step of 14B rows (these generate several times a step) or those of a row that lacks a phase.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from megarl.core.layout import Layout
from megarl.models.config import ModelConfig, Moe, Rope
from megarl.placement.calibrate import fit, with_rates
from megarl.placement.cluster import Cluster, make_cluster
from megarl.placement.compute import score_seconds, update_seconds
from megarl.placement.generation import rollout_seconds
from megarl.placement.lengths import ASSUMED_SPREAD, Lengths, assumed_lengths, cut_lognormal, lognormal
from megarl.placement.memory import Role, role_bytes, server_bytes
from megarl.placement.rates import Rates
from megarl.placement.server_share import sharing
from megarl.placement.sizes import model_sizes
from megarl.placement.space import RECOMPUTE, Layouts, Servers, one_layout
from megarl.placement.workload import ACTOR, ROLLOUT, Workload

ROWS = Path(__file__).parent.parent / "published" / "rows.csv"
LENGTHS = ROWS.with_name("lengths.csv")
PHASES = ("generation_s", "update_s", "score_s")
SAMPLES, PROMPT_TOKENS, LONGEST_PROMPT, RUNNING = 16, 159.0, 2048, 1024
# Their trainer's own time between stages.
BARRIER_S = 5.0
# What the dense rows calibrate, and what those of a mixture of experts do.
DENSE = ("traffic", "update_s", "call_sample_s", "decode_layer_s", "decode_request_s")
EXPERTS = ("expert_layer_s",)
Known = Literal["known", "left out", "low", "likely", "high"]
SETS = {
    "H100 7B": ("dapo-7b", "grpo-7b"),
    "H20 7B": ("dapo-7b-h20",),
    "H20 14B": ("dapo-14b-h20",),
    "H100 30B-A3B": ("dapo-30b",),
}


def _config(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, moe: Moe | None = None
) -> ModelConfig:
    return ModelConfig(
        family="qwen",
        architecture="",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
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


QWEN_30B_A3B = _config(48, 2048, 32, 4, 6144, 151936, Moe(128, 8, 768))
MODELS = {
    "qwen2.5-7b": _config(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-14b": _config(48, 5120, 40, 8, 13824, 152064),
    "qwen3-14b": _config(40, 5120, 40, 8, 17408, 151936),
    "qwen3-30b-a3b": QWEN_30B_A3B,
}


def published_lengths() -> list[dict[str, str]]:
    """Mean responses of runs that others published, with the limit that each had."""
    with LENGTHS.open() as file:
        return list(csv.DictReader(file))


@cache
def _means(without: frozenset[str]) -> tuple[float, ...]:
    return tuple(float(row["mean"]) for row in published_lengths() if row["rows"] not in without)


def median_length(without: set[str]) -> float:
    """Median of the published means, without those of these rows."""
    return float(np.median(_means(frozenset(without))))


@dataclass(frozen=True)
class Row:
    """One published row. family_tokens: of a sample, where its own are not known."""

    values: dict[str, str]
    family_tokens: float

    @property
    def family(self) -> str:
        return self.values["family"]

    @property
    def config(self) -> ModelConfig:
        return MODELS[self.values["model"]]

    @property
    def megatron(self) -> bool:
        return self.values["engine"] == "megatron"

    @property
    def unfused(self) -> bool:
        """Megatron without fused RoPE."""
        return self.megatron and self.values["fused_rope"] == "0"

    @property
    def calibrates_dense(self) -> bool:
        """Every row of the first family that ran on megarl's kernels."""
        return self.family == "dapo-7b" and self.megatron and not self.unfused

    @property
    def calibrates_experts(self) -> bool:
        """Every second row of the mixture of experts."""
        return self.family == "dapo-30b" and int(self.values["number"]) % 2 == 0 and self.megatron

    def number(self, name: str) -> float:
        return float(self.values[name] or "nan")

    @property
    def tokens(self) -> float:
        """Of a sample, prompt and response."""
        return self.number("sample_tokens") if self.values["sample_tokens"] else self.family_tokens

    def responses(self, lengths: Known) -> Lengths:
        """Known: with the mean that the row had. Left out: the median of published means without this family's; else as a
        plan assumes."""
        limit = self.number("max_response")
        if lengths == "known":
            return lognormal(self.tokens - PROMPT_TOKENS, ASSUMED_SPREAD, limit)
        if lengths == "left out":
            own = {self.family, self.family.removesuffix("-h20"), self.values["model"]}
            return cut_lognormal(median_length(own), ASSUMED_SPREAD, limit)
        found: Lengths = getattr(assumed_lengths(limit), lengths)
        return found

    def workload(self, lengths: Known = "known") -> Workload:
        return Workload(
            models={ACTOR: self.config, ROLLOUT: self.config},
            prompts=512,
            samples_per_prompt=SAMPLES,
            mini_batches=512 // int(self.values["mini_prompts"]),
            prompt_tokens=PROMPT_TOKENS,
            responses=self.responses(lengths),
            longest_sample=LONGEST_PROMPT + int(self.values["max_response"]),
            micro_tokens=(),
            max_running=RUNNING,
        )

    def layout(self, micro: str) -> Layouts:
        tp, pp, cp, ep, devices = (int(self.values[name]) for name in ("tp", "pp", "cp", "ep", "devices"))
        longest = LONGEST_PROMPT + int(self.values["max_response"])
        # Published of one device; ours are of one data-parallel rank, and hold the longest sample.
        tokens = max(int(self.values[micro] or 0) * cp, longest)
        layout = Layout(tp=tp, pp=pp, cp=cp, ep=ep, sequence_parallel=tp > 1, world_size=devices)
        [recompute] = [kind for kind in RECOMPUTE if kind == self.values["recompute"]]
        return one_layout(layout, tokens, recompute)

    def servers(self, cluster: Cluster) -> Servers:
        """vLLM's: its share is of the whole device, and of all that a server holds there."""
        devices, tp = (np.array([int(self.values[name])]) for name in ("devices", "server_tp"))
        whole = Servers(devices, tp, np.ones(1), devices)
        held = self.number("memory_share") * cluster.device.memory_bytes
        return replace(whole, share=sharing(whole, cluster, held))

    def cluster(self, rates: Rates) -> Cluster:
        return with_rates(make_cluster(self.values["device"], max(1, int(self.values["devices"]) // 8)), vars(rates))

    def predict(self, rates: Rates, lengths: Known = "known") -> dict[str, float]:
        """Seconds by phase, and of the step."""
        work, config, cluster = self.workload(lengths), self.config, self.cluster(rates)
        servers = self.servers(cluster)
        asked = replace(work, prompts=int(self.values["generated_prompts"]))
        held = server_bytes(config, servers, cluster, 2)
        found = {
            "generation_s": rollout_seconds(config, servers, held, asked, cluster).total[0],
            "update_s": update_seconds(config, self.layout("update_micro_tokens"), work, cluster).total[0],
            "score_s": score_seconds(config, self.layout("score_micro_tokens"), work, cluster).total[0],
        }
        found["step_s"] = (
            sum(found.values()) + 3 * BARRIER_S + (self.number("reshard_s") if self.values["reshard_s"] else 0)
        )
        return {phase: float(seconds) for phase, seconds in found.items()}


@dataclass(frozen=True)
class Point:
    """One phase of one row."""

    row: Row
    phase: str
    predicted: float
    measured: float
    calibrates: bool
    counts: bool

    @property
    def use(self) -> str:
        return "calibration" if self.calibrates else "held out" if self.counts else "shown"


def points(rows: Sequence[Row], rates: Rates, lengths: Known = "known") -> list[Point]:
    """Predicted and measured of every phase that was published and that the model has an answer to."""
    found = []
    for row in rows:
        if row.values["oom"] == "1" or row.values["packed"] == "0":
            continue
        predicted = row.predict(rates, lengths)
        for phase in (*PHASES, "step_s"):
            if row.values[phase] and (row.megatron or phase == "generation_s"):
                generates = phase == "generation_s"
                calibrates = phase in PHASES and (row.calibrates_dense or (row.calibrates_experts and not generates))
                calibrates |= generates and row.family == "dapo-7b"
                found.append(Point(row, phase, predicted[phase], row.number(phase), calibrates, _counts(row, phase)))
    return found


def _counts(row: Row, phase: str) -> bool:
    if phase == "generation_s":
        return row.values["generated_prompts"] == "512"
    if phase == "step_s" and (row.family == "dapo-14b-h20" or not all(row.values[each] for each in PHASES)):
        return False
    return not row.unfused


def calibrated(rows: Sequence[Row], rates: Rates, names: Sequence[str]) -> Rates:
    """The rates under which these rows are predicted best; step_s is not looked at."""

    def pairs(cluster: Cluster) -> list[tuple[float, float]]:
        found = points(rows, cluster.rates)
        return [(p.predicted, p.measured) for p in found if p.phase in PHASES and p.counts]

    return fit(with_rates(make_cluster("H100", 1), vars(rates)), names, pairs).rates


def read_rows() -> list[Row]:
    with ROWS.open() as file:
        values = list(csv.DictReader(file))
    return [Row(each, tokens) for each, tokens in zip(values, _tokens(values), strict=True)]


def _tokens(rows: Sequence[dict[str, str]]) -> Iterator[float]:
    """Tokens of a sample that follow from the MFU: of H20 rows their own, of others the least of the family."""
    own = [_tokens_by_mfu(row) for row in rows]
    for row, mine in zip(rows, own, strict=True):
        family = [each for other, each in zip(rows, own, strict=True) if other["family"] == row["family"]]
        yield mine if row["device"] == "H20" else min(family)


def _tokens_by_mfu(row: dict[str, str]) -> float:
    """verl's formula: 6 operations a parameter that a token meets, and 12 L h for each token of its sequence."""
    if not row["mfu"] or not row["update_s"]:
        return float("inf")
    config = MODELS[row["model"]]
    peak = make_cluster(row["device"], 1).device.flops
    operations = float(row["mfu"]) * peak * int(row["devices"]) * float(row["update_s"])
    sizes, moe = model_sizes(config), config.moe
    met = sizes.total - (0 if moe is None else config.num_layers * sizes.routed * (1 - moe.top_k / moe.num_experts))
    samples = 512 * SAMPLES
    # Of a mean length m with this spread, tokens see (1 + spread^2) m others on average: a quadratic equation for m.
    square = 12 * config.num_layers * config.num_heads * config.head_dim * (1 + ASSUMED_SPREAD**2)
    return float((-6 * met + np.sqrt((6 * met) ** 2 + 4 * square * operations / samples)) / (2 * square))


def fits(row: Row) -> tuple[bool, float]:
    """Whether a row's roles fit: actor and reference beside the awake servers, then the update with servers asleep."""
    cluster = make_cluster(row.values["device"], max(1, int(row.values["devices"]) // 8))
    actor = role_bytes(row.config, row.layout("update_micro_tokens"), 2, Role(trained=True, head=True))
    reference = role_bytes(row.config, row.layout("score_micro_tokens"), 2, Role(trained=False, head=True)).weights[0]
    awake = row.number("memory_share") * cluster.device.memory_bytes
    offload = row.values["offload"] == "1"
    generating = awake + (0 if offload else actor.state[0] + reference)
    training = actor.state[0] + actor.working[0] + cluster.rates.offloaded_bytes + (0 if offload else reference)
    most = max(float(generating), float(training))
    return most <= cluster.usable_bytes, most
