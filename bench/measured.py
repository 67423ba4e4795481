"""What was measured, as a page: made of bench/results/*.json, nothing typed in. One command:

    python -m bench.measured > docs/measured.md

A figure that a result does not have is on no page. What each benchmark does stands in its own file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support import seen_parts as parts
from bench.support import seen_runs as runs
from bench.support.measure import RESULTS, no_options

HEAD = """# Measured

Every figure here comes from a file in `bench/results/`, and this page is made of them:
`python -m bench.measured > docs/measured.md`. A row's command measures it again. All was measured on CPUs; nothing of megarl was
ever run on CUDA.

| command | measured against | seen | machine | date |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """One result. against: what the figures are beside. seen: the figures, made of what the benchmark wrote."""

    name: str
    against: str
    seen: Callable[[Any], str]
    command: str = ""  # where it is not the module of that name


ROWS = (
    Row("quickstart_seeds", "three seeds from nothing; 200 held-out prompts, greedy", runs.quickstart_seeds),
    Row("learning_curves", "the same task before training", runs.learning_curves),
    Row("rollout_overhead", "a bare asyncio client on the same server, same prompts", runs.rollout_overhead),
    Row("collector", "stub servers that answer 8,192 tokens at once; target 2 M", runs.collector),
    Row("sample_store", "straw-queue, on the same blocks", runs.sample_store),
    Row("chaos", "the same run in peace", runs.chaos),
    Row("save_kills", "a run in peace, weights bit for bit at every step; limits one and two steps done again", runs.save_kills),
    Row("async_kills", "`megarl replay` of its journal, without servers, weights bit for bit", runs.async_kills),
    Row("soak", "the first quarter of its steps", runs.soak),
    Row("recovery", "a new start; limit 30 s", runs.recovery),
    Row("kills", "the same run in peace, weights and metrics bit for bit", runs.kills),
    Row("journal", "nothing: the journal alone, on this machine's disk", runs.journal),
    Row("rollout_simulation", "the synchronous run; 512 servers, 65,536 samples each", runs.rollout_simulation),
    Row(
        "asynchronous",
        "tokens/s of the synchronous run of the same turn; targets 1.5 split, 1.2 colocated, servers idle below 10%",
        runs.asynchronous,
    ),
    Row(
        "asynchronous_learn",
        "the synchronous seeds' spread, on the quickstart's task",
        runs.asynchronous_learn,
        "python -m bench.asynchronous --learn",
    ),
    Row("peers_trl", "TRL 1.16.0 on the same model, prompts and reward; target 2.5", runs.peers_trl),
    Row("peers_trl_avx512", "the same on another machine, which has AVX-512", runs.peers_trl, "python -m bench.peers_trl"),
    Row(
        "peers_trl_avx2",
        "the same on a slower machine, which has no AVX-512: in float32, steps alone",
        runs.peers_trl,
        "python -m bench.peers_trl --only steps --dtype float32",
    ),
    Row("peers_algorithms", "verl 0.9.1's core_algos on the same batch, one thread", runs.peers_algorithms),
    Row("cpu_step", "this machine's own matmul and memory rates, each part's share of its bound", runs.cpu_step),
    Row("start", "every process of the quickstart, from the command to the first request for a sample", runs.start),
    Row("driver_overhead", "the seconds of a quickstart step", runs.driver_overhead),
    Row("parallel_invariance", "one rank; [every case](parallel_invariance.md)", parts.parallel_invariance),
    Row("packing", "the same sequences padded, log-normal lengths", parts.packing),
    Row(
        "bare_speed",
        "a hand-written loop over transformers, the fastest of three forms: its seconds over ours",
        parts.bare_speed,
    ),
    Row("checkpoint_memory", "megatron-core's own gathering of the same state, on the first rank", parts.checkpoint_memory),
    Row("load", "`cat` of the same checkpoint in the same turn", parts.load),
    Row("logprob_memory", "the whole matrix of log-probs, 4,096 tokens at a vocabulary of 151,936", parts.logprob_memory),
    Row("reward_model", "chance, 0.5", runs.reward_model),
    Row("ppo_reward_model", "the same before PPO", runs.ppo_reward_model),
    Row("plan_vs_measured", "real runs of 2 to 4 ranks, beside predictions from `megarl profile`", parts.plan_vs_measured),
    Row("plan_published", "measurements that others published ([placement](placement.md))", parts.plan_published),
    Row("recipes_published", "published runs of the same size ([placement](placement.md))", parts.recipes_published),
    Row("hybridflow", "HybridFlow's 16 published winners ([placement](placement.md))", parts.hybridflow),
    Row("plan", "limits of the search for PPO's five roles", parts.plan),
    Row("placements", "the first of four named placements, same rollouts", parts.placements),
    Row("submit", "90 s from `megarl submit` to the first token, SLURM over three nodes (namespaces)", parts.submit),
    Row("balance", "lower bounds, 16,384 samples over 128 ranks", parts.balance),
    Row("header_fuzz", "the safetensors library, on files with broken headers", parts.header_fuzz),
    Row("memory_predicted", "the engine's own live bytes ([placement](placement.md))", parts.memory_predicted),
    Row("layer_memory", "torch's fake tensors at the widths of real models ([placement](placement.md))", parts.layer_memory),
    Row("deterministic", "the same server by default ([the same run twice](determinism.md))", runs.deterministic),
    Row("server_sleep", "the server awake", parts.server_sleep),
    Row("served_models", "transformers, the same weights and sequences; bound 1e-4 nats", parts.served_models),
    Row("weight_sync", "shared memory: memcpy once, target 40%; broadcast: a bare one, target 70%", parts.weight_sync),
    Row(
        "weight_sync_layouts",
        "the trainer's export, by the engine's hashes, at every layout to servers of tp 1 and 2 ([all](weight_sync_layouts.md))",
        parts.weight_sync_layouts,
    ),
    Row("disk_sync", "whole versions; what AdamW changes by learning rate ([weight sync](weight_sync.md))", parts.disk_sync),
    Row("algorithms", "plain loops", parts.algorithms),
    Row("agents", "the same before GRPO; target under 0.3 to over 0.8 in 600 s ([agents](agents.md))", runs.agents),
    Row("images", "the same before GRPO, which guesses (0.25); the image of another row", runs.images),
    Row("agent_load", "a bare asyncio client at a stub that answers at once or later; targets 90% and 2 ms", runs.agent_load),
    Row("sandbox", "a Python without a sandbox, started each time; target 20 ms pooled, 200 at once", runs.sandbox),
    Row("suite", "the goal of 20 minutes on two cores", runs.suite),
)  # fmt: skip


def render(folder: Path = RESULTS) -> str:
    """The page."""
    lines = []
    for row in ROWS:
        result = json.loads((folder / f"{row.name}.json").read_text())
        machine, date = _machine(result["host"])
        command = row.command or f"python -m bench.{row.name}"
        lines.append(f"| `{command}` | {row.against} | {row.seen(result)} | {machine} | {date} |\n")
    return HEAD + "".join(lines)


def _machine(host: dict[str, Any]) -> tuple[str, str]:
    """What a result says of its machine, and when it was."""
    name, load = host["cpu"] or host["machine"], host["load_average"]
    return f"{name}, {host['cores']} cores" + ("" if load is None else f", load {load:.1f}"), host["date"]


if __name__ == "__main__":
    no_options(__doc__)
    print(render(), end="")
