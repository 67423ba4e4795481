"""The one table of metric names: what each is, its unit, and how it is written for people. Nothing is measured here.

A writer refuses a name that is not in the table. docs/metrics.md is made from it:

    python -m megarl.core.metrics > docs/metrics.md
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal, get_args

from megarl.core.errors import MegarlError
from megarl.core.supervised_metrics import SUPERVISED, MetricSpec

# What a run spends its seconds on, in the order of the loop.
PHASES: Mapping[str, str] = MappingProxyType(
    {
        "start": "servers and ranks started, models loaded",
        "data": "rows taken and packed (supervised training)",
        "rollout": "responses generated, graded and packed",
        "logprobs": "log-probs of the responses under the actor before its update; for KTO's KL, of answers behind other prompts",
        "reference": "log-probs of the responses under the reference; its refresh",
        "teacher": "log-probs of the responses under the teacher",
        "values": "values of the responses under the critic before its update",
        "reward_model": "scores of the responses under the reward model",
        "advantages": "advantages and returns computed from rewards and values",
        "critic": "the critic's forward, backward and optimizer steps; one on devices of its own learns beside the next "
        "rollout, and what is waited for it then counts in that step",
        "update": "the actor's forward, backward and optimizer steps",
        "sync": "new weights sent to every server, and verified",
        "eval": "held-out prompts answered and graded, or held-out rows evaluated",
        "save": "checkpoint committed",
        "export": "weights written as an HF folder",
    }
)

# Phases outside of steps: of no step's metrics, only in the table at a run's end.
OUTSIDE: frozenset[str] = frozenset({"start", "export"})

# What a role does on its ranks, as their memory is told apart.
Operation = Literal["logprobs", "values", "update", "evaluate", "save", "send"]

_METRICS: dict[str, MetricSpec] = {
    "reward/mean": MetricSpec("reward", "mean over the step's samples", ".3f"),
    "reward/std": MetricSpec("reward", "population standard deviation over the step's samples", ".3f"),
    "reward/failures": MetricSpec(
        "samples", "without a grade: the grader raised, died, timed out or gave no number; not a reward of 0", ".0f"
    ),
    "reward/by/NAME/mean": MetricSpec(
        "reward", "scores of the grader NAME, before its weight: mean over the step's samples", ".3f"
    ),
    "reward/by/NAME/std": MetricSpec("reward", "population standard deviation of the same", ".3f"),
    "reward/by/NAME/KEY": MetricSpec(
        "1", "what the grader NAME gave beside its score as KEY, mean over the step's samples that have it", ".3f"
    ),
    "reward/by/NAME/failures": MetricSpec("samples", "samples that the grader NAME gave no score", ".0f"),
    "reward/model_score": MetricSpec("reward", "score of the reward model at the last token, before its weight", ".3f"),
    "reward/kl": MetricSpec("nats", "KL to the reference, mean over trained tokens; only with kl_in: reward", ".2e"),
    "reward/kl_coef": MetricSpec("1", "what a nat of it cost in this step", ".3g"),
    "agent/turns_mean": MetricSpec("turns", "responses of the policy in one episode, mean", ".2f"),
    "agent/turns_max": MetricSpec("turns", "the most of one episode", ".0f"),
    "agent/policy_tokens": MetricSpec(
        "tokens", "that the policy wrote in one episode, mean; these are trained on", ".1f"
    ),
    "agent/environment_tokens": MetricSpec(
        "tokens",
        "between what the policy wrote, of the environment, of tools and of the template; mean of an episode",
        ".1f",
    ),
    "agent/generation_s": MetricSpec("s", "of one episode at the servers, mean", ".3f"),
    "agent/environment_s": MetricSpec("s", "of one episode in its environment, mean", ".3f"),
    "agent/tools_s": MetricSpec(
        "s", "of one episode in tools and in reading their calls, mean; only with tools", ".3f"
    ),
    "agent/sequences": MetricSpec(
        "sequences", "that one episode is trained on as, mean; only with agent.rewritten: split", ".2f"
    ),
    "agent/tool_calls": MetricSpec("calls", "of tools in one episode, mean", ".2f"),
    "agent/tool_failures": MetricSpec(
        "calls",
        "that no tool answered: it raised, took too long, or was not run, or not read; the policy is told",
        ".0f",
    ),
    "agent/tool_results_cut": MetricSpec("results", "of tools, longer than agent.tool_result_characters", ".0f"),
    "agent/environment_failures": MetricSpec(
        "episodes", "not trained on because their environment raised, took too long, or answered nonsense", ".0f"
    ),
    "agent/truncated_by/BUDGET": MetricSpec(
        "fraction", "episodes that ended because BUDGET was used up: turns, tokens, time / episodes", ".3f"
    ),
    "agent/by/NAME": MetricSpec(
        "1", "what the environment gave as its metric NAME, mean over the episodes that have it", ".3f"
    ),
    "rollout/num_samples": MetricSpec("samples", "samples trained on in this step", ".0f"),
    "rollout/prompt_len_mean": MetricSpec("tokens", "mean prompt length", ".1f"),
    "rollout/response_len_mean": MetricSpec(
        "tokens", "mean response length, the end-of-sequence token included", ".1f"
    ),
    "rollout/response_len_max": MetricSpec("tokens", "longest response", ".0f"),
    "rollout/truncated": MetricSpec(
        "fraction", "samples that ended at the length limit, or at a budget of their episode / samples", ".3f"
    ),
    "rollout/tokens_per_pass": MetricSpec(
        "tokens", "that a pass of the policy gave where servers guess ahead, mean over samples; not of episodes", ".2f"
    ),
    "rollout/failed": MetricSpec(
        "samples", "samples that no server could answer, or whose environment or harness failed", ".0f"
    ),
    "rollout/staleness_mean": MetricSpec(
        "versions", "how far a sample's oldest trained token is behind the weights that it is trained on, mean", ".2f"
    ),
    "rollout/staleness_max": MetricSpec("versions", "the most that one is behind", ".0f"),
    "rollout/staleness/NUMBER": MetricSpec("fraction", "samples that are NUMBER versions behind / samples", ".3f"),
    "rollout/versions_per_sample": MetricSpec("versions", "weight versions that wrote a sample, mean", ".2f"),
    "rollout/carried_tokens": MetricSpec(
        "fraction", "trained tokens of older versions than the newest / trained tokens", ".3f"
    ),
    "rollout/stale_samples": MetricSpec(
        "samples", "left out of the step because all of their trained tokens are too old", ".0f"
    ),
    "rollout/groups_running": MetricSpec("groups", "under way once the step had its own", ".0f"),
    "rollout/groups_finished": MetricSpec("groups", "finished and left over once the step had its own", ".0f"),
    "rollout/requests_queued": MetricSpec("requests", "that waited for their turn at the collectors", ".0f"),
    "rollout/dropped/REASON": MetricSpec(
        "groups",
        "not trained on, because of REASON, since the run or its resume began: zero_variance, keep_groups, late, rewound",
        ".0f",
    ),
    "rollout/groups_lost": MetricSpec(
        "groups", "asked for anew because the collector that held them died, so far", ".0f"
    ),
    "perf/servers_idle": MetricSpec(
        "fraction", "of the time since the step before, the mean over servers without a request", ".3f"
    ),
    "rollout/server_restarts": MetricSpec(
        "restarts", "times so far that a server or the router was started again, since the run was last started", ".0f"
    ),
    "rollout/zero_variance_groups": MetricSpec(
        "fraction", "groups whose rewards are all equal / groups: they teach nothing", ".3f"
    ),
    "rollout/logprob_diff_mean": MetricSpec(
        "nats", "mean over trained tokens of |log-prob at rollout - the trainer's own| (docs/algorithms.md)", ".1e"
    ),
    "rollout/logprob_diff_max": MetricSpec(
        "nats",
        "the largest such difference in the step; with algorithm.old_logprobs: rollout it holds what earlier mini-batches taught",
        ".1e",
    ),
    "rollout/drifted": MetricSpec(
        "1 or 0", "whether the step was left out, because logprob_diff_mean is above algorithm.max_logprob_diff", ".0f"
    ),
    "rollout/rewinds": MetricSpec(
        "rewinds",
        "times so far that the run went back to a checkpoint (on_bad_gradient or on_logprob_diff: rewind)",
        ".0f",
    ),
    "rollout/correction_ess": MetricSpec(
        "fraction", "effective sample size of the importance weights, (sum w)^2 / (K sum w^2)", ".3f"
    ),
    "rollout/correction_touched": MetricSpec(
        "fraction", "trained tokens whose importance weight the bound decided / trained tokens", ".4f"
    ),
    "actor/loss": MetricSpec(
        "nats", "pg_loss + kl_coef * kl_loss - entropy_coef * entropy, all reduced alike, mean over mini-batches", ".4f"
    ),
    "actor/pg_loss": MetricSpec("nats", "clipped policy loss, reduced as algorithm.reduction says", ".4f"),
    "actor/pg_clipfrac": MetricSpec("fraction", "trained tokens whose loss the clip decided / trained tokens", ".4f"),
    "actor/approx_kl": MetricSpec(
        "nats", "KL of the old policy to the one under update (k3), mean over trained tokens", ".2e"
    ),
    "teacher/wait_s_mean": MetricSpec(
        "s",
        "from the end of a sample to what the teacher's servers say of it, retries included, mean over samples",
        ".2f",
    ),
    "teacher/wait_s_max": MetricSpec("s", "the longest of these", ".2f"),
    "teacher/failures": MetricSpec(
        "samples", "that the teacher's servers said nothing of within teacher.servers.timeout_s, or refused", ".0f"
    ),
    "actor/teacher_rest": MetricSpec(
        "fraction",
        "what the teacher gives to all but its algorithm.distill_top_k likeliest tokens, mean over trained tokens",
        ".4f",
    ),
    "actor/kl_loss": MetricSpec(
        "nats", "KL of the policy to the reference, reduced as the loss is; only with a KL in the loss", ".2e"
    ),
    "actor/entropy": MetricSpec(
        "nats", "entropy of the temperature-scaled distribution, mean over trained tokens", ".3f"
    ),
    "actor/grad_norm": MetricSpec("1", "global gradient norm before clipping, mean over the optimizer steps", ".3g"),
    "actor/grad_share_max": MetricSpec(
        "fraction", "largest share of one parameter in the squared gradient norm, over the optimizer steps", ".3f"
    ),
    "actor/skipped_steps": MetricSpec(
        "optimizer steps",
        "left out because their gradient was not finite, or a spike (optimizer.on_bad_gradient: skip)",
        ".0f",
    ),
    "actor/lr": MetricSpec("1", "learning rate of the step's last optimizer step", ".2e"),
    "critic/vf_loss": MetricSpec("reward^2", "clipped value loss, reduced as algorithm.reduction says", ".4f"),
    "critic/vf_clipfrac": MetricSpec(
        "fraction", "trained tokens whose value loss the clip decided / trained tokens", ".4f"
    ),
    "critic/values": MetricSpec("reward", "value under update, mean over trained tokens", ".3f"),
    "critic/returns": MetricSpec("reward", "what the critic learns, mean over trained tokens", ".3f"),
    "critic/explained_variance": MetricSpec(
        "fraction", "1 - Var(returns - values) / Var(returns) over trained tokens, before the update", ".3f"
    ),
    "critic/grad_norm": MetricSpec("1", "as actor/grad_norm, of the critic", ".3g"),
    "critic/grad_share_max": MetricSpec("fraction", "as actor/grad_share_max, of the critic", ".3f"),
    "critic/skipped_steps": MetricSpec("optimizer steps", "as actor/skipped_steps, of the critic", ".0f"),
    "critic/lr": MetricSpec("1", "as actor/lr, of the critic", ".2e"),
    "eval/accuracy": MetricSpec(
        "fraction",
        "held-out samples with a reward (with eval.grader: that grader's score) of at least 0.5 / held-out samples; each prompt "
        "counts the same, however many answers its set is asked for",
        ".3f",
    ),
    "eval/reward": MetricSpec("reward", "mean over held-out samples; each prompt counts the same", ".3f"),
    "eval/response_len_mean": MetricSpec("tokens", "mean length of held-out responses", ".1f"),
    "eval/truncated": MetricSpec(
        "fraction",
        "held-out samples that ended at the length limit, or at a budget of their episode / held-out samples",
        ".3f",
    ),
    "eval/turns_mean": MetricSpec("turns", "responses of the policy in one held-out episode, mean", ".2f"),
    "eval/by/NAME": MetricSpec(
        "1",
        "what the environment gave as its metric NAME, mean over held-out episodes; GRADER/KEY: reward/by/GRADER/KEY of "
        "held-out samples",
        ".3f",
    ),
    "eval/set/NAME/accuracy": MetricSpec("fraction", "eval/accuracy of the rows whose eval.set_key is NAME", ".3f"),
    "eval/set/NAME/reward": MetricSpec("reward", "eval/reward of the same", ".3f"),
    "eval/pass_at_K": MetricSpec("fraction", "held-out prompts with a right one among K of their answers", ".3f"),
    "eval/set/NAME/pass_at_K": MetricSpec("fraction", "eval/pass_at_K of the same", ".3f"),
    "eval/failures": MetricSpec("samples", "held-out samples that no grade could be given to", ".0f"),
    "sync/probe_diff_max": MetricSpec(
        "nats", "largest |server's log-prob - the trainer's| over the probe's tokens and all servers", ".1e"
    ),
    "sync/hashed_tensors": MetricSpec(
        "tensors",
        "whose hashes agreed with the trainer's, over all ranks of all servers; only with sync.verify: hash",
        ".0f",
    ),
    "sync/bytes": MetricSpec(
        "bytes", "weights sent, counted once however many servers receive them; over the disk: written", ".3e"
    ),
    "sync/weight_version": MetricSpec("version", "version that every server acknowledged; only goes up", ".0f"),
    "sync/servers": MetricSpec("servers", "servers that hold this version", ".0f"),
    "data/epoch": MetricSpec("epochs", "times that the training rows have been gone through, as a fraction", ".3f"),
    "data/dropped_prompts": MetricSpec("rows", "training rows left out because they are over the length limit", ".0f"),
    "perf/step_s": MetricSpec("s", "wall time of the step", ".2f"),
    **{
        f"perf/{name}_s": MetricSpec("s", f"phase `{name}`: {what}", ".2f")
        for name, what in PHASES.items()
        if name not in OUTSIDE
    },
    "perf/rollout_tokens_per_s": MetricSpec(
        "tokens/s",
        "response tokens that were finished since the last step / perf/generation_s, over all servers",
        ".0f",
    ),
    "perf/generation_s": MetricSpec("s", "with groups under way since the last step, beside other work too", ".2f"),
    "perf/train_tokens_per_s": MetricSpec(
        "tokens/s", "prompt and response tokens, once an epoch, / perf/update_s, over all ranks", ".0f"
    ),
    "perf/train_flops": MetricSpec(
        "FLOP", "model FLOPs of the actor's updates, forward and backward, without recompute (docs/flops.md)", ".3e"
    ),
    "perf/tflops_per_device": MetricSpec("TFLOP/s", "perf/train_flops / perf/update_s / actor's devices", ".3f"),
    "perf/mfu": MetricSpec("fraction", "perf/tflops_per_device / cluster.peak_tflops, where that is given", ".3f"),
    "perf/tokens_per_s": MetricSpec("tokens/s", "prompt and response tokens / perf/step_s", ".0f"),
    "perf/ranks_idle": MetricSpec(
        "fraction",
        "of perf/step_s, outside of the phases in which ranks compute; a critic beside them does not count",
        ".3f",
    ),
    "perf/driver_s": MetricSpec("s", "perf/step_s less the time that the driver spent waiting for others", ".4f"),
    "perf/driver_fraction": MetricSpec("fraction", "perf/driver_s / perf/step_s", ".4f"),
    "perf/journal_s": MetricSpec(
        "s",
        "writing the journal since the step before, disk waits included: the busiest collector and the coordinator, "
        "beside other work",
        ".4f",
    ),
    "perf/rank_peak_bytes": MetricSpec("bytes", "the largest memory/ROLE/OPERATION of the step", ".3e"),
    "perf/recoveries": MetricSpec(
        "recoveries", "times that the run went on by itself after a process died, since it was last started", ".0f"
    ),
    "perf/host_memory_bytes": MetricSpec("bytes", "memory in use on the driver's machine", ".3e"),
    "memory/ROLE/OPERATION": MetricSpec(
        "bytes",
        f"peak memory of the fullest rank while ROLE did OPERATION ({', '.join(get_args(Operation))}), with all that shares the "
        "rank: of the device on cuda, resident on cpu",
        ".3e",
    ),
}

METRICS: Mapping[str, MetricSpec] = MappingProxyType({**_METRICS, **SUPERVISED})
_GIVEN = ("rollout/staleness/", "rollout/dropped/", "agent/truncated_by/", "agent/by/", "eval/by/")
# What a run names, and its place in the table. A set's name may have slashes, as those of the hub.
_ROWS = (
    (re.compile(rf"^memory/[a-z_]+/(?:{'|'.join(get_args(Operation))})$"), "memory/ROLE/OPERATION"),
    (re.compile(r"^eval/set/.*/"), "eval/set/NAME/"),
    (re.compile(r"(?<=/)pass_at_\d+$"), "pass_at_K"),
    (re.compile(r"^reward/by/[A-Za-z0-9_]+/"), "reward/by/NAME/"),
    (re.compile(r"^reward/by/NAME/(?!(mean|std|failures)$)[A-Za-z0-9_.-]+$"), "reward/by/NAME/KEY"),
)


def check_names(names: Iterable[str]) -> None:
    """Raises MegarlError where a name is not in the table, with the nearest one that is."""
    unknown = sorted(name for name in names if row_of(name) not in METRICS)
    if unknown:
        near = {name: difflib.get_close_matches(name, METRICS, n=1) for name in unknown}
        listed = ", ".join(f"{name} (nearest: {near[name][0]})" if near[name] else name for name in unknown)
        raise MegarlError(
            f"Not in the table of metrics: {listed}. Add a row, with unit and meaning, in megarl/core/metrics.py."
        )


def row_of(name: str) -> str:
    """The name that a metric has in the table.

    NAME stands for one that a recipe or an environment gave, ROLE and OPERATION for a role's doings, K for a number.
    """
    if start := next((start for start in _GIVEN if name.startswith(start)), ""):
        return next(row for row in METRICS if row.startswith(start))
    for pattern, row in _ROWS:
        name = pattern.sub(row, name)
    return name


def format_value(name: str, value: float) -> str:
    """A metric for people: its value in the table's format, without a unit. An absent number reads `-`."""
    return "-" if math.isnan(value) else format(value, METRICS[row_of(name)].format)


if __name__ == "__main__":
    from megarl.core.metrics_page import render_docs

    print(render_docs(), end="")
