"""For every key of a recipe another value than its default, and the configurations in which the test tries it.

A key that a section gains needs a line in VALUES; without one the test fails.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# Where recipes and models are; filled in when the world is written.
ROOT = "{root}"
OWN = "tests.support.dry.own"
MCP_SERVER = f"{sys.executable} {Path(__file__).parents[1] / 'support' / 'dry' / 'mcp_tool.py'}"

_PARALLEL = {
    "tp": ["2"],
    "pp": ["2"],
    "cp": ["2"],
    "ep": ["2"],
    "etp": ["2"],
    "vpp": ["2"],
    "sequence_parallel": ["false"],
    "first_stage_layers": ["1"],
    "last_stage_layers": ["1"],
}
_OPTIMIZER = {
    "name": ["sgd", "adam"],
    "lr": ["2.0e-2"],
    "beta1": ["0.5"],
    "beta2": ["0.5"],
    "eps": ["1.0e-2"],
    "weight_decay": ["0.5"],
    "clip_grad": ["1.0e-2"],
    "spike_factor": ["2.0"],
    "on_bad_gradient": ["skip", "rewind"],
    "momentum": ["0.5"],
    "schedule": ["linear", "cosine"],
    "warmup_steps": ["2"],
    "warmup_share": ["0.4"],
    "min_lr": ["1.0e-3"],
    "freeze_router": ["true"],
    "freeze_vision_tower": ["false"],
}
_TRAINED = {
    "recompute": ["selective", "full"],
    "recompute_num_layers": ["1"],
    "offload": ["[grads]", "[params]", "[optimizer]"],
}
_FROZEN = {"offload": ["[params]"]}
_ONLY = {"only": ["{data_source: a}"]}
_HTTP = {
    "weight": ["0.5"],
    "timeout_s": ["5.0"],
    "retries": ["1"],
    "retry_for_s": ["9.0"],
    "concurrency": ["2"],
    "key_env": ["GRADER_KEY"],
}


def _under(section: str, values: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    return {f"{section}.{name}": texts for name, texts in values.items()}


# By dotted key; several values are tried one by one.
COMMON: dict[str, Sequence[str]] = {
    **_under("run", {"name": ["other"], "dir": [f"{ROOT}/elsewhere"], "seed": ["2"]}),
    **_under(
        "cluster",
        {
            "platform": ["cuda"],
            "devices": ["2"],
            "file": [f"{ROOT}/cluster.yaml"],
            "max_recoveries": ["2"],
            "spares": ["1"],
            "peak_tflops": ["1.0"],
        },
    ),
    **_under("model", {"path": [f"{ROOT}/dense2", f"{ROOT}/moe"], "dtype": ["bfloat16"]}),
    **_under("data", {"prompt_key": ["question"], "shuffle": ["false"], "chat_template_kwargs": ["{opening: a}"]}),
    **_under("data", {"config": ["other"], "train_split": ["more"], "eval_config": ["other"], "eval_split": ["more"]}),
    **_under("actor.parallel", _PARALLEL),
    **_under("actor.optimizer", _OPTIMIZER),
    **_under("actor", {"micro_batch_tokens": ["128"], "aux_loss_coef": ["0.5"], **_TRAINED}),
    **_under("actor.lora", {"rank": ["4"], "alpha": ["8.0"], "targets": ["[linear_fc1]", "all"]}),
    "eval.before": ["false"],
    "eval.every": ["1"],
    **_under(
        "train",
        {
            "steps": ["4"],
            "epochs": ["3"],
            "save_every": ["1"],
            "keep_last": ["1"],
            "async_save": ["true"],
            "keep_every": ["1"],
            "keep_best.metric": ["eval/reward", "rm/eval_score", "dpo/eval_margin", "kto/eval_kl"],
            "keep_best.mode": ["min"],
            "keep_best.count": ["2"],
        },
    ),
    **_under(
        "deadlines", {f"{name}_s": ["9000.0"] for name in ("start", "rollout", "train", "sync", "save", "answer")}
    ),
    **_under(
        "report",
        {
            "tensorboard": ["false"],
            "wandb.project": ["another"],
            "writer": [f"{OWN}:Told"],
            "profiler.steps": ["[2]"],
            "profiler.ranks": ["[1]"],
            "profiler.memory": ["true"],
            "samples": ["1"],
        },
    ),
}
_REFERENCE = {**_under("reference.parallel", _PARALLEL), **_under("reference", {**_FROZEN, "refresh_every": ["1"]})}

TRAIN: dict[str, Sequence[str]] = {
    **COMMON,
    **_REFERENCE,
    **_under("train", {"journal": ["false"], "journal_keep": ["all"], "max_rewinds": ["1"]}),
    **_under(
        "data",
        {
            "train": [f"{ROOT}/prompts2.jsonl"],
            "eval": [f"{ROOT}/prompts2.jsonl"],
            "answer_key": ["gold"],
            "images_key": ["pictures"],
            "max_image_pixels": ["10000"],
            "max_prompt_tokens": ["32"],
            "over_length": ["error"],
            "final_answer": ["true"],
            "prompt_suffix": ["' Now:'"],
            "mix": ["{a: 1, b: 3}"],
            "mix_key": ["kind"],
            "prompt_template": ["'a {prompt} b'"],
            "system_prompt": ["b"],
        },
    ),
    **_under(
        "rollout",
        {
            "servers": ["2", "{urls: ['http://127.0.0.1:3']}"],
            "servers.urls": ["['http://127.0.0.1:4', 'http://127.0.0.1:5']"],
            "servers.key_env": ["GRADER_KEY"],
            "tp": ["2"],
            "prompts_per_step": ["2"],
            "samples_per_prompt": ["2"],
            "max_response_tokens": ["8"],
            "temperature": ["0.5"],
            "top_p": ["0.5"],
            "top_k": ["5"],
            "stop": ["[x]"],
            "max_running_requests": ["8"],
            "kv_tokens": ["5000"],
            "quantization": ["fp8"],
            "deterministic": ["true"],
            "concurrency": ["2"],
            "max_staleness": ["1"],
            "in_flight": ["finish", "in_place"],
            "keep_kv": ["true"],
            "oversample": ["1.5"],
            "late": ["drop", "resume"],
            "longest_first": ["false"],
            "collectors": ["2"],
            "piece_tokens": ["3"],
            "max_restarts": ["3", "0"],
            "offload": ["[weights]", "[kv_cache]"],
            "server_args": ["[--chunked-prefill-size, '512']"],
        },
    ),
    **_under(
        "agent",
        {
            "environment": ["guess_number"],
            "environments": [
                f"{{a: {{environment: '{OWN}:Talk', settings: {{turns: 2}}}}, b: {{environment: '{OWN}:Talk'}}}}"
            ],
            "environment_key": ["kind"],
            "command": ["[python3, -c, pass]"],
            "function": [f"{OWN}:shout"],
            "served_as": ["another"],
            "listen": ["node"],
            "processes": ["1"],
            "settings": ["{turns: 2}"],
            "workers": ["1"],
            "max_turns": ["2"],
            "turn_tokens": ["2"],
            "timeout_s": ["1.0e-9"],
            "step_timeout_s": ["0.01"],
            "tools": [f"['{OWN}:hear']"],
            "mcp": [f"['{MCP_SERVER}']"],
            "environment_tools": ["[peek]"],
            "tool_parser": ["llama3"],
            "tool_timeout_s": ["0.01"],
            "tool_result_characters": ["2"],
            "max_calls": ["1"],
            "rewritten": ["keep"],
            "credit": ["turn"],
        },
    ),
    **_under("reward", {"fn": ["exact"], "workers": ["3"], "timeout_s": ["5.0"], "max_failed_share": ["0.0"]}),
    **_under(
        "reward.graders.rule",
        {"weight": ["0.5"], "fn": ["exact"], "kind": ["remote"], **_ONLY},
    ),
    **_under(
        "reward.graders.remote",
        {**_HTTP, **_ONLY, "url": ["http://b"], "batch": ["2"], "kind": ["judge"]},
    ),
    **_under(
        "reward.graders.judge",
        {
            **_HTTP,
            **_ONLY,
            "url": ["http://b"],
            "model": ["other"],
            "template": ["'{{ response }}'"],
            "temperature": ["0.5", "null"],
            "max_tokens": ["9"],
            "parse": ["'mark (\\d)'", "json:points"],
            "scale": ["5.0"],
            "kind": ["rule"],
        },
    ),
    **_under(
        "reward.graders.classify",
        {
            **_HTTP,
            **_ONLY,
            "url": ["http://b"],
            "tokenizer": [f"{ROOT}/other_words"],
            "output": ["1"],
            "kind": ["rule"],
        },
    ),
    **_under(
        "reward.graders.code",
        {
            **_ONLY,
            "weight": ["0.5"],
            "field": ["checks"],
            "score": ["share"],
            "max_tests": ["3"],
            "timeout_s": ["2.0"],
            "memory_mb": ["64"],
            "disk_mb": ["8"],
            "processes": ["9"],
            "output_kb": ["8"],
            "sandboxes": ["3"],
            "kind": ["rule"],
        },
    ),
    **_under(
        "algorithm",
        {
            "preset": ["rloo", "dapo"],
            "advantage": ["rloo", "distill", "gae", "gdpo"],
            "normalize_std": ["false"],
            "gamma": ["0.5"],
            "lam": ["0.5"],
            "whiten": ["true", "false"],
            "advantage_clip": ["0.3"],
            "overlong_buffer": ["0.9"],
            "truncated": ["mask"],
            "policy_loss": ["cispo", "gmpo", "reinforce", "distill", "distill_top"],
            "clip_low": ["0.05"],
            "clip_high": ["0.05"],
            "dual_clip": ["1.1"],
            "distill_top_k": ["3"],
            "distill_beta": ["0.0", "0.5"],
            "distill_forward_weight": ["0.5"],
            "settings": ["{scale: 3.0}"],
            "kl_coef": ["0.3"],
            "kl_kind": ["k1", "k2", "abs"],
            "kl_in": ["reward", "loss"],
            "kl_control.target": ["50.0"],
            "kl_control.horizon": ["20"],
            "entropy_coef": ["0.1"],
            "reduction": ["sequence-mean", "group-mean", "constant"],
            "drop_zero_variance_groups": ["true"],
            "keep_groups.grader": ["judge"],
            "keep_groups.above": ["2.0"],
            "keep_groups.below": ["0.4"],
            "refill_rounds": ["0"],
            "old_logprobs": ["rollout"],
            "max_logprob_diff": ["1.0e-9"],
            "on_logprob_diff": ["skip"],
            "correction.kind": ["mask", "reject", "truncate"],
            "correction.level": ["sequence", "geometric"],
            "correction.low": ["0.8"],
            "correction.high": ["1.2"],
            "correction.reject.level": ["sequence", "token"],
            "correction.reject.low": ["0.999999"],
            "correction.reject.high": ["1.000001"],
        },
    ),
    **_under("actor", {"mini_batch_samples": ["4"], "epochs": ["2"], "routing_replay": ["true"]}),
    **_under("critic.parallel", _PARALLEL),
    **_under("critic.optimizer", _OPTIMIZER),
    **_under(
        "critic",
        {
            "path": [f"{ROOT}/scored"],
            "epochs": ["2"],
            "warmup_steps": ["1"],
            "value_clip": ["0.01", "null"],
            **_TRAINED,
        },
    ),
    **_under("reward_model.parallel", _PARALLEL),
    **_under("reward_model", {"path": [f"{ROOT}/scored2"], "weight": ["0.5"], "level": ["token"], **_FROZEN}),
    **_under("teacher.parallel", _PARALLEL),
    **_under("teacher", {"path": [f"{ROOT}/dense2", f"{ROOT}/moe"], **_FROZEN}),
    **_under(
        "teacher.servers",
        {
            "urls": ["['http://127.0.0.1:1', 'http://127.0.0.1:3']"],
            "key_env": ["GRADER_KEY"],
            "timeout_s": ["5.0"],
            "concurrency": ["2"],
        },
    ),
    "placement.name": ["colocate"],
    "placement.pools": ["{a: {devices: 1, roles: [actor]}, b: {devices: 1, roles: [reference]}}"],
    **_under(
        "sync",
        {
            "transport": ["broadcast", "disk"],
            "folder": [f"{ROOT}/elsewhere"],
            "bucket_mb": ["1"],
            "tolerance": ["0.5"],
            "verify": ["hash"],
            "lora": ["adapters"],
        },
    ),
    **_under(
        "eval",
        {
            "temperature": ["0.5"],
            "top_p": ["0.5"],
            "top_k": ["5"],
            "max_response_tokens": ["8"],
            "samples_per_prompt": ["2"],
            "max_prompts": ["2"],
            "grader": ["rule", "math"],
            "set_key": ["question"],
            "sets": [
                *("{a: {temperature: 1.0}}", "{a: {top_p: 0.5}}", "{a: {top_k: 5}}", "{b: {samples_per_prompt: 2}}"),
                *("{b: {max_response_tokens: 8}}", "{b: {grader: rule}}", "{b: {max_prompts: 1}}"),
            ],
            "overlap": ["true"],
        },
    ),
}
_MIX = {"mix": ["{a: 1, b: 3}"], "mix_key": ["kind"]}
_ROWS = {
    **COMMON,
    **_under("data", {"max_tokens": ["24"], "prompt_key": ["question"], **_MIX}),
    **_under("data", {"images_key": ["pictures"], "max_image_pixels": ["10000"]}),
    "train.batch_samples": ["2"],
}
SFT: dict[str, Sequence[str]] = {
    **_ROWS,
    **_under("data", {"train": [f"{ROOT}/demonstrations2.jsonl"], "eval": [f"{ROOT}/demonstrations2.jsonl"]}),
    **_under("data", {"response_key": ["reply"], "messages_key": ["chat"]}),
    "actor.micro_batch_tokens": ["72"],
    "sft.loss": ["dft"],
}
_PAIRS = {
    **_ROWS,
    **_under("data", {"train": [f"{ROOT}/pairs2.jsonl"], "eval": [f"{ROOT}/pairs2.jsonl"]}),
    **_under("data", {"chosen_key": ["better"], "rejected_key": ["worse"], "margin_key": ["ahead"]}),
}
RM: dict[str, Sequence[str]] = {**_PAIRS, "rm.center_coef": ["0.5"]}
DPO: dict[str, Sequence[str]] = {
    **_PAIRS,
    **_REFERENCE,
    **_under(
        "dpo",
        {
            "loss": ["robust", "hinge", "ipo", "apo_zero", "apo_down", "simpo", "orpo"],
            "margin": ["0.5"],
            "beta": ["0.5"],
            "label_smoothing": ["0.2"],
            "length_normalized": ["true"],
            "sft_coef": ["0.5"],
        },
    ),
}
KTO: dict[str, Sequence[str]] = {
    **_ROWS,
    **_REFERENCE,
    **_under("data", {"train": [f"{ROOT}/labelled2.jsonl"], "eval": [f"{ROOT}/labelled2.jsonl"]}),
    **_under("data", {"response_key": ["reply"], "label_key": ["good"]}),
    "actor.micro_batch_tokens": ["72"],
    **_under(
        "kto", {"loss": ["apo_zero"], "beta": ["0.5"], "desirable_weight": ["1.5"], "undesirable_weight": ["0.5"]}
    ),
}
_PAIR_LOSSES = {loss: [f"dpo.loss={loss}"] for loss in ("ipo", "simpo", "orpo")}
VALUES: dict[str, dict[str, Sequence[str]]] = {"train": TRAIN, "sft": SFT, "rm": RM, "dpo": DPO, "kto": KTO}

# Configurations by name: overrides over the base recipe.
_KL, _PPO = "algorithm.kl_coef=0.1", "algorithm.preset=ppo"
_TWO, _MOE = "cluster.devices=2", f"model.path={ROOT}/moe"
_CUDA = ["cluster.platform=cuda", "model.dtype=bfloat16"]
_SCORED, _TEACHER = f"reward_model.path={ROOT}/scored", f"teacher.path={ROOT}/dense2"
_HELD_OUT = f"data.eval={ROOT}/prompts2.jsonl"
_GRADERS = (
    "reward.graders.rule={kind: rule, fn: math}",
    "reward.graders.remote={kind: remote, url: 'http://a', batch: 4}",
    "reward.graders.judge={kind: judge, url: 'http://a', model: m}",
    "reward.graders.code={kind: code}",
    f"reward.graders.classify={{kind: classify, url: 'http://a', tokenizer: {ROOT}/dense2}}",
)
_AGENT = (f"agent.environment={OWN}:Talk", "rollout.max_response_tokens=100", "data.max_prompt_tokens=340")
_TOOLS = (f"agent.tools=['{OWN}:look']", "agent.tool_parser=qwen25", "agent.turn_tokens=20")
_BY_ROW = (
    f"agent.environments={{a: {{environment: '{OWN}:Talk'}}, b: {{environment: '{OWN}:Talk', settings: {{turns: 1}}}}}}",
    "agent.environment_key=data_source",
)
_ROOM = ("rollout.max_response_tokens=62", "data.max_prompt_tokens=450")  # for another tool
_HARNESS = (f"agent.function={OWN}:converse", "rollout.max_response_tokens=100", "data.max_prompt_tokens=340")
_ASYNCHRONOUS = ("rollout.max_staleness=1",)
_BEST = ("train.steps=4", "train.save_every=1", "train.keep_last=1", "eval.every=1")
_EPOCHS = ("train.steps=0", "train.epochs=2")
_SEARCH = "placement.name=colocate"
_DISTILL = ("algorithm.policy_loss=distill", _TEACHER)
_SERVED = ("algorithm.policy_loss=distill", "teacher.servers={urls: ['http://127.0.0.1:1', 'http://127.0.0.1:2']}")
_DISTILL_TOP = ("algorithm.policy_loss=distill_top", _TEACHER)


def _set(rows: str) -> list[str]:
    """Rows of a data set: a folder with two configurations."""
    return [f"data.{key}={ROOT}/sets/{rows}" for key in ("train", "eval")] + ["data.config=plain"]


def _role_contexts(role: str, *needs: str, moe: str = _MOE) -> dict[str, Sequence[str]]:
    """A role on two devices: as it is, cut each way, and as a mixture of experts."""
    return {
        f"{role} on two": [*needs, _TWO],
        f"{role} cut by tp": [*needs, _TWO, f"{role}.parallel.tp=2"],
        f"{role} cut by pp": [*needs, _TWO, f"{role}.parallel.pp=2"],
        f"{role} of experts": [*needs, _TWO, moe],
    }


def _optimizer_contexts(role: str, *needs: str) -> dict[str, Sequence[str]]:
    return {
        f"{role} by adam": needs,
        f"{role} by sgd": [*needs, f"{role}.optimizer.name=sgd"],
        f"{role} falling": [*needs, f"{role}.optimizer.schedule=linear"],
        f"{role} recomputed": [*needs, f"{role}.recompute=full"],
    }


CONTEXTS: dict[str, dict[str, Sequence[str]]] = {
    "train": {
        "plain": [],
        "critic": [_PPO],
        "critic, whitened": [_PPO, "algorithm.whiten=true"],
        "KL in the loss": [_KL],
        "KL steered": [_KL, "algorithm.kl_in=reward", "algorithm.kl_control.target=0.1"],
        "distilled": _DISTILL,
        "distilled at the likeliest": _DISTILL_TOP,
        "distilled from servers": _SERVED,
        "distilled at the likeliest, from servers": ["algorithm.policy_loss=distill_top", *_SERVED[1:]],
        "distilled advantages": ["algorithm.advantage=distill", _TEACHER],
        "dapo": ["algorithm.preset=dapo"],
        "graders, dapo": [*_GRADERS, "algorithm.preset=dapo"],
        "preset of a KL in the reward, distilled": ["algorithm.preset=reinforce_pp", *_DISTILL],
        "corrected": ["algorithm.correction={}"],
        "bounded drift": ["algorithm.max_logprob_diff=1.0e-9"],
        "masked": ["algorithm.correction.kind=mask"],
        "corrected twice": ["algorithm.correction.reject={low: 0.8, high: 2.0}"],
        "own loss": [f"algorithm.policy_loss={OWN}:scaled_loss"],
        "own advantage": [f"algorithm.advantage={OWN}:scaled_advantages"],
        "adapters": ["actor.lora={}", _KL],
        "agent": _AGENT,
        "agent with tools": [*_AGENT, *_TOOLS],
        "environments by the row": [*_BY_ROW, *_AGENT[1:]],
        "agent by tokens": [*_AGENT, "algorithm.advantage=reinforce_pp"],
        "harness": _HARNESS,
        "tools alone": ["rollout.max_response_tokens=100", "data.max_prompt_tokens=340", *_TOOLS],
        "tools and room": [*_ROOM, *_TOOLS],
        "agent with tools and room": [*_AGENT[:1], *_ROOM, *_TOOLS],
        "experts": [_MOE],
        "latent attention": [*_CUDA, f"model.path={ROOT}/latent"],
        "experts on cuda": [_MOE, *_CUDA],
        "held out": [_HELD_OUT],
        "best": [_HELD_OUT, *_BEST, "train.keep_best={metric: eval/accuracy}", "eval.temperature=0.5"],
        "mixed": ["data.mix={a: 3, b: 1}"],
        "asynchronous": _ASYNCHRONOUS,
        "asynchronous, in place": [*_ASYNCHRONOUS, "rollout.in_flight=in_place"],
        "asynchronous, held out": [*_ASYNCHRONOUS, _HELD_OUT],
        "carried over": [*_ASYNCHRONOUS, "rollout.oversample=1.5", "rollout.concurrency=1", "train.steps=4"],
        "two servers": ["rollout.servers=2"],
        "over the disk": ["sync.transport=disk"],
        "external servers": ["rollout.servers={urls: ['http://127.0.0.1:1', 'http://127.0.0.1:2']}"],
        "few at a time": ["rollout.concurrency=2", "train.steps=4"],
        "set": _set("prompts"),
        "marked answers": ["data.answer_key=marked"],
        "sampled": [_HELD_OUT, "eval.temperature=0.5"],
        "graders": [*_GRADERS, _HELD_OUT],
        "sampled sets": [_HELD_OUT, "eval.temperature=0.5", "eval.set_key=data_source"],
        "graded sets": [*_GRADERS, _HELD_OUT, "eval.set_key=data_source"],
        "no rule": [_GRADERS[1]],
        "scored": [_SCORED],
        "scored tokens": [_SCORED, "algorithm.advantage=gae"],
        "saves": ["train.save_every=1"],
        "by epochs": _EPOCHS,
        "bfloat16": ["model.dtype=bfloat16"],
        "cuda": _CUDA,
        "bfloat16 on cuda": [*_CUDA, f"model.path={ROOT}/wide"],
        "wandb": ["report.wandb={}"],
        "profiled": [_TWO, "report.profiler={steps: [1]}"],
        "searched": [_SEARCH],
        "searched, critic and scores": [_PPO, _KL, _SCORED, _SEARCH],
        "searched, distilled": [*_DISTILL, _SEARCH],
        "searched, KL on two": [_KL, _TWO, _SEARCH],
        "KL on two": [_KL, _TWO],
        **_role_contexts("actor"),
        **_role_contexts("reference", _KL),
        # A head of its own: from one of zeros next to nothing reaches the routers.
        **_role_contexts("critic", _PPO, "critic.optimizer.lr=1.0e-2", moe=f"critic.path={ROOT}/scored_moe"),
        **_role_contexts("reward_model", _SCORED, moe=f"reward_model.path={ROOT}/scored_moe"),
        **_role_contexts("teacher", *_DISTILL, moe=f"teacher.path={ROOT}/moe"),
        **_optimizer_contexts("actor"),
        **_optimizer_contexts("critic", _PPO, "critic.optimizer.lr=1.0e-2"),
    },
    **{
        command: {
            "plain": [],
            "held out": [f"data.eval={ROOT}/{rows}2.jsonl"],
            "best": [f"data.eval={ROOT}/{rows}2.jsonl", *_BEST, f"train.keep_best={{metric: {command}/eval_loss}}"],
            "set": _set(rows),
            "experts": [_MOE],
            "adapters": ["actor.lora={}", *([f"model.path={ROOT}/scored"] if command == "rm" else [])],
            "saves": ["train.save_every=1"],
            "by epochs": _EPOCHS,
            "mixed": ["data.mix={a: 3, b: 1}"],
            "wandb": ["report.wandb={}"],
            "profiled": [_TWO, "report.profiler={steps: [1]}"],
            **_role_contexts("actor"),
            **_optimizer_contexts("actor"),
            **extra,
        }
        for command, rows, extra in (
            ("sft", "demonstrations", {}),
            ("rm", "pairs", {}),
            ("dpo", "pairs", {**_PAIR_LOSSES, **_role_contexts("reference")}),
            ("kto", "labelled", _role_contexts("reference")),
        )
    },
}

# The configurations in which the keys of a section are tried: those of its longest name here, or else the plain one.
_SEARCHED = {
    "actor": "searched",
    **dict.fromkeys(("reference", "critic", "reward_model"), "searched, critic and scores"),
    "teacher": "searched, distilled",
}
_PLACED = {
    role: ("plain", f"{role} on two", f"{role} cut by tp", f"{role} cut by pp", f"{role} of experts", searched)
    for role, searched in _SEARCHED.items()
}
SWEEPS: dict[str, Sequence[str]] = {
    **{f"{role}.parallel": contexts for role, contexts in _PLACED.items()},
    "actor.offload": ("plain", "adapters", "experts", _SEARCHED["actor"]),
    "actor.recompute": ("plain", "adapters", "experts", "latent attention", _SEARCHED["actor"]),
    **{f"{role}.recompute_num_layers": ("plain", f"{role} recomputed") for role in ("actor", "critic")},
    "reference.offload": ("plain", "KL in the loss", "adapters", "distilled", _SEARCHED["reference"]),
    **dict.fromkeys(("critic.offload", "critic.recompute"), ("critic", _SEARCHED["critic"])),
    "reward_model.offload": ("scored", _SEARCHED["reward_model"]),
    "teacher.offload": ("distilled", "distilled from servers", _SEARCHED["teacher"]),
    "teacher.servers": ("plain", "distilled", "distilled from servers"),
    "actor.optimizer": ("plain", "actor by sgd", "actor falling"),
    "actor.optimizer.freeze_router": ("plain", "adapters", "experts"),
    "critic.optimizer.freeze_router": ("plain", "critic by adam", "critic of experts"),
    "critic.optimizer": ("plain", "critic by adam", "critic by sgd", "critic falling"),
    "agent": ("plain", "agent", "agent with tools", "tools alone"),
    **dict.fromkeys(("agent.function", "agent.served_as", "agent.listen"), ("plain", "harness")),
    **dict.fromkeys(("agent.command", "agent.processes", "agent.workers"), ("plain",)),
    "agent.mcp": ("plain", "tools and room"),
    **dict.fromkeys(("agent.environments", "agent.environment_key"), ("plain", "environments by the row")),
    "agent.environment_tools": ("plain", "tools alone", "agent with tools and room"),
    "agent.credit": ("plain", "agent", "agent by tokens"),
    "cluster.platform": ("plain", "bfloat16"),
    "data": ("plain", "held out", "set", "marked answers"),
    "rollout": ("plain", "cuda", "searched", "external servers"),
    "sync": ("plain", "over the disk"),
    "data.mix_key": ("plain", "mixed"),
    "rollout.quantization": ("plain", "external servers", "bfloat16 on cuda"),
    "rollout.in_flight": ("plain", "asynchronous", "carried over"),
    "rollout.keep_kv": ("plain", "asynchronous", "asynchronous, in place"),
    "rollout.late": ("plain",),
    "rollout.oversample": ("plain", "asynchronous"),
    "rollout.collectors": ("plain", "two servers", "external servers"),
    "rollout.longest_first": ("few at a time",),
    "reward": ("plain", "graders"),
    **dict.fromkeys(("reward.workers", "reward.timeout_s"), ("plain", "graders", "no rule")),
    # All combinations of its functions are in test_algorithm_keys.py.
    "algorithm": (
        "plain",
        "critic",
        "KL steered",
        "distilled",
        "distilled at the likeliest",
        "dapo",
        "own loss",
        "own advantage",
    ),
    **dict.fromkeys(("algorithm.kl_in", "algorithm.kl_kind"), ("plain", "KL in the loss", "KL steered")),
    "algorithm.kl_coef": ("plain", "KL in the loss", "preset of a KL in the reward, distilled", "distilled advantages"),
    "algorithm.correction": ("plain", "corrected", "masked", "distilled", "asynchronous"),
    "algorithm.correction.reject": ("plain", "corrected twice", "distilled"),
    "algorithm.whiten": ("plain", "critic, whitened", "KL steered", "distilled", "dapo", "own advantage"),
    **dict.fromkeys(
        ("algorithm.distill_top_k", "algorithm.distill_beta", "algorithm.distill_forward_weight"),
        ("plain", "distilled at the likeliest", "distilled at the likeliest, from servers"),
    ),
    "algorithm.keep_groups": ("plain", "dapo", "graders, dapo"),
    "algorithm.on_logprob_diff": ("plain", "bounded drift"),
    "actor": ("plain", "adapters", "experts"),
    "actor.routing_replay": ("plain", "experts", "experts on cuda"),
    "reference": ("plain", "KL in the loss", "adapters", "distilled"),
    "critic": ("plain", "critic", "distilled"),
    "reward_model": ("plain", "scored", "scored tokens", "distilled", "distilled advantages"),
    "teacher": ("plain", "distilled", "distilled at the likeliest", "distilled advantages"),
    "placement": ("plain", "KL on two", "searched, KL on two"),
    "eval": ("plain", "held out", "sampled", "graders"),
    "eval.sets": ("plain", "held out", "sampled sets", "graded sets"),
    "eval.overlap": ("plain", "held out", "asynchronous, held out"),
    "sync.lora": ("plain", "adapters"),
    "train": ("plain", "saves"),
    "train.keep_best": ("plain", "best"),
    "train.epochs": ("plain", "by epochs"),
    "dpo": ("plain", *_PAIR_LOSSES),
    "report": ("plain", "wandb", "profiled"),
}

# Keys that no configuration accepts another value of, and why they are there all the same.
_SEEN = dict.fromkeys(
    ("data.images_key", "data.max_image_pixels", "actor.optimizer.freeze_vision_tower"),
    "models of these runs see no images, which is refused: see tests/models/test_recipe_vision.py, tests/run/test_towers.py",
)
_OF_TRAIN = "a section that runs of `megarl train` have too: the key is refused with that reason"
NEVER: dict[str, dict[str, str]] = {
    "train": {
        **_SEEN,
        "critic.optimizer.freeze_vision_tower": _SEEN["data.images_key"],
        "data.over_length": "error refuses a run whose rows are too long, as the world's are: that is its effect",
        **dict.fromkeys(
            ("rollout.top_p", "rollout.top_k"),
            "samples from a part of the distribution are refused: that, said with the reason, is their effect",
        ),
        "agent.workers": "where environments run changes no sample: see tests/agents/test_environment_processes.py",
        "train.max_rewinds": "a dry run ends once, and does not go back: see tests/rollout/test_resumed.py",
        "agent.processes": "how many harnesses wait changes no sample: see tests/agents/test_harness.py",
        "agent.rewritten": "keep is for templates that rewrite, and there refuse refuses the run: that is its effect",
        "rollout.late": "a dry run's carried groups are never late, as the oldest go first: see tests/rollout/test_producer.py",
        **dict.fromkeys(
            (f"reward.graders.{kind}.kind" for kind in ("rule", "remote", "judge", "code", "classify")),
            "it says which keys stand beside it: alone it cannot change",
        ),
    },
    **{
        command: {
            **dict.fromkeys(
                ("cluster.file", "deadlines.rollout_s", "deadlines.sync_s", "deadlines.answer_s", "report.samples"),
                _OF_TRAIN,
            ),
            **_SEEN,
            **own,
        }
        for command, own in (
            ("sft", {"train.keep_best.metric": "demonstrations have one, sft/eval_loss, and no other to choose"}),
            ("rm", {}),
        )
    },
    **{
        command: _SEEN
        | dict.fromkeys(
            (
                "cluster.file",
                "deadlines.rollout_s",
                "deadlines.sync_s",
                "deadlines.answer_s",
                "report.samples",
                "reference.refresh_every",
            ),
            _OF_TRAIN,
        )
        for command in ("dpo", "kto")
    },
}
# What a platform goes through without effect, so that the same recipe runs on all: a line at the start says so.
WITHOUT_EFFECT = {"rollout.offload": "cpu"}
