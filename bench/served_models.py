"""Whether servers compute what a model's config says: SGLang on this machine beside transformers, config by config.

    python -m bench.served_models

A tiny random model of each family that is served on CPUs, then others that differ from it in one key: heads, RoPE, widths,
biases, routers. Both are asked for the log-probs of the same sequences, in float32. Where megarl refuses to serve a model, its
server is asked all the same: it should differ, or the refusal is for nothing. Exits with 1 where one that is not refused differs.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.support.measure import no_options, write
from megarl.core.errors import MegarlError, UserError
from megarl.core.platform import get_platform
from megarl.models.hf_config import load_model_config
from megarl.run.servers_check import check_alone
from megarl.serving.server import ProcessPlace, ServerSpec
from megarl.sync.verify import probe_servers
from tests.support.forked_servers import Copies, forked_servers
from tests.support.olmo import as_published
from tests.support.served import CONTEXT, KEY, START_S, HfModel
from tests.support.tiny import GEMMA4_EXPERTS, LLAMA3, longrope, write_tiny_model

BOUND = 1e-4  # nats
LENGTHS = (2, 11, 60)
VOCABULARY = 100
GROWING = {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4}  # at work within LENGTHS
SPARSE: dict[str, Any] = {"mlp_only_layers": []}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
SCALED = {"linear": LINEAR, "yarn": {"rope_parameters": YARN}, "llama3": {"rope_parameters": LLAMA3}}
OF_YARN: dict[str, dict[str, Any]] = {
    "attention scaled": {"attention_factor": 1.7},
    "magnitudes": {"mscale": 0.7, "mscale_all_dim": 1.4},
    "magnitudes of 0": {"mscale": 0.0, "mscale_all_dim": 0.0},
    "between whole dimensions": {"truncate": False},
    "other turns": {"beta_fast": 16.0, "beta_slow": 2.0},
    "a key of SGLang's": {"attn_factor": 1.7},
}
PUBLISHED = "published"  # RoPE in the keys of OLMo-3's published configs
HEADS = {"tied": TIED, "head of its own": UNTIED}
WHOLE_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
HALF = {"partial_rotary_factor": 0.5}
# Family -> what all its models have here, and by what name those differ. Latent attention is served on CUDA alone.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "qwen2": ({}, {**HEADS, **SCALED}),
    "qwen3": (
        {},
        {
            **HEADS,
            **SCALED,
            "one key-value head": {"num_key_value_heads": 1},
            **{f"yarn, {told}": {"rope_parameters": YARN | more} for told, more in OF_YARN.items()},
        },
    ),
    "llama": ({}, {**HEADS, **SCALED, "wide heads": {"head_dim": 32}, "epsilon": {"rms_norm_eps": 1e-2}}),
    "mistral": ({}, {**HEADS, **SCALED, "wide heads": {"head_dim": 32}}),
    "phi3": ({}, {**HEADS, "longrope": longrope(), "longrope over a part": longrope(0.75)}),
    "glm4": ({}, {**HEADS, "no biases": {"attention_bias": False}, "RoPE over whole heads": WHOLE_ROPE}),
    "granite": (
        {},
        {
            **HEADS,
            **SCALED,
            "wide heads": {"head_dim": 32},
            "no multipliers": {
                **{"embedding_multiplier": 1.0, "attention_multiplier": 1.0},
                **{"residual_multiplier": 1.0, "logits_scaling": 1.0},
            },
        },
    ),
    "granitemoe": (
        {},
        {
            **HEADS,
            **SCALED,
            "wide heads": {"head_dim": 32},
            "another base": {"rope_parameters": {"rope_type": "default", "rope_theta": 2.5}},
            "epsilon": {"rms_norm_eps": 1e-2},
            "no multipliers": {
                **{"embedding_multiplier": 1.0, "attention_multiplier": 1.0},
                **{"residual_multiplier": 1.0, "logits_scaling": 1.0},
            },
        },
    ),
    "olmo2": (
        {},
        {**HEADS, **SCALED, "one key-value head": {"num_key_value_heads": 1}, "wide heads": {"head_dim": 32}},
    ),
    "olmo3": (
        {},
        {
            **HEADS,
            **SCALED,
            **{f"{kind}, as published": {**scaled, PUBLISHED: True} for kind, scaled in SCALED.items()},
            "attention scaled, as published": {"rope_parameters": YARN | {"attention_factor": 1.7}, PUBLISHED: True},
            "other base": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
            "wide heads": {"head_dim": 32},
            "other layers": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        },
    ),
    "olmoe": (
        {},
        {
            **HEADS,
            **SCALED,
            "weights normalized": {"norm_topk_prob": True},
            "two key-value heads": {"num_key_value_heads": 2},
            "epsilon": {"rms_norm_eps": 1e-2},
        },
    ),
    "exaone4": (
        {},
        {
            **HEADS,
            **SCALED,
            "llama3, as published": {**SCALED["llama3"], PUBLISHED: True},
            "other base": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
            "first context at the top": {**SCALED["llama3"], "original_max_position_embeddings": 16},
            "no window": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
            "no layer with a window": {"layer_types": ["full_attention"] * 3},
            "every layer with a window": {"layer_types": ["sliding_attention"] * 3},
            "a period in numbers": {"sliding_window_pattern": 2, "layer_types": None},
            "epsilon": {"rms_norm_eps": 1e-5},
            "layers without a period": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "wide heads": {"head_dim": 32},
            "one key-value head": {"num_key_value_heads": 1},
        },
    ),
    "smollm3": (
        {},
        {
            **HEADS,
            **SCALED,
            "attention scaled": {"rope_parameters": YARN | {"attention_factor": 1.7}},
            "other layers": {"no_rope_layers": [0, 1, 1]},
            "other base": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
            "wide heads": {"head_dim": 32},
            "one key-value head": {"num_key_value_heads": 1},
        },
    ),
    "seed_oss": (
        {},
        {
            **HEADS,
            **SCALED,
            "no bias behind attention": {"attention_out_bias": False},
            "no biases": {"attention_bias": False},
            "other base": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
            "one key-value head": {"num_key_value_heads": 1},
        },
    ),
    "apertus": (
        {},
        {
            **HEADS,
            **SCALED,
            "as published": {"rope_parameters": None},
            "wide heads": {"head_dim": 32},
            "one key-value head": {"num_key_value_heads": 1},
            "epsilon": {"rms_norm_eps": 1e-2},
        },
    ),
    "ernie4_5": (
        {},
        {**HEADS, **SCALED, "wide heads": {"head_dim": 32}, "one key-value head": {"num_key_value_heads": 1}},
    ),
    "ernie4_5_moe": (
        {},
        {
            **HEADS,
            **SCALED,
            "wide heads": {"head_dim": 32},
            "no shared experts": {"moe_num_shared_experts": 0},
            "experts in all layers": {"moe_layer_start_index": 0},
            "a last layer without experts": {"moe_layer_end_index": 1},
            "epsilon": {"rms_norm_eps": 1e-2},
        },
    ),
    "hunyuan_v1_dense": (
        {},
        {
            **HEADS,
            "linear": LINEAR,
            "llama3": {"rope_parameters": LLAMA3},
            "RoPE not scaled": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "wide heads": {"head_dim": 32},
            "one key-value head": {"num_key_value_heads": 1},
            "epsilon": {"rms_norm_eps": 1e-2},
        },
    ),
    "hunyuan_v1_moe": (
        {},
        {
            **HEADS,
            "linear": LINEAR,
            "llama3": {"rope_parameters": LLAMA3},
            "a number of experts for each layer": {"moe_topk": [2, 2, 2]},
            "wide heads": {"head_dim": 32},
            "epsilon": {"rms_norm_eps": 1e-2},
        },
    ),
    "minimax_m2": (
        {},
        {
            **HEADS,
            "linear": {"rope_parameters": LINEAR["rope_parameters"] | HALF},
            "llama3": {"rope_parameters": LLAMA3 | HALF},
            "RoPE over whole heads": WHOLE_ROPE,
            "elements rotated, as published": {"rotary_dim": 8},
            "wide heads": {"head_dim": 32},
            "one key-value head": {"num_key_value_heads": 1},
            "epsilon": {"rms_norm_eps": 1e-2},
        },
    ),
    "gemma3": (
        {},
        {
            **HEADS,
            "other layers": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "scale of queries": {"query_pre_attn_scalar": 168},
        },
    ),
    "gemma4": (
        {},
        {
            **HEADS,
            "linears of their own for values": {"attention_k_eq_v": False},
            "heads alike": {"global_head_dim": 16, "num_global_key_value_heads": 2},
            "logits not capped": {"final_logit_softcapping": None},
            "experts": GEMMA4_EXPERTS,
            "other layers": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "RoPE over all frequencies": {
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
        },
    ),
    "ministral3": (
        {},
        {
            **HEADS,
            **{kind: {"rope_parameters": each["rope_parameters"] | GROWING} for kind, each in SCALED.items()},
            "RoPE not scaled": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | GROWING},
            "first context at the top": {"rope_parameters": YARN | GROWING, "original_max_position_embeddings": 16},
            "queries that do not grow": {"rope_parameters": YARN | GROWING | {"llama_4_scaling_beta": 0.0}},
            "another scale of RoPE": {"rope_parameters": YARN | GROWING | {"mscale": 0.5, "mscale_all_dim": 1.0}},
            "attention scaled": {"rope_parameters": YARN | GROWING | {"attention_factor": 1.7}},
            "wide heads": {"head_dim": 32},
        },
    ),
    "qwen3_moe": (SPARSE, {**HEADS, **SCALED, "weights not normalized": {"norm_topk_prob": False}}),
    "qwen2_moe": (
        SPARSE,
        {**HEADS, **SCALED, "weights normalized": {"norm_topk_prob": True}, "no biases": {"qkv_bias": False}},
    ),
    "mixtral": ({}, {**HEADS, **SCALED, "wide heads": {"head_dim": 32}, "three experts": {"num_experts_per_tok": 3}}),
    "glm4_moe": (
        {},
        {
            **HEADS,
            "norms of queries and keys": {"use_qk_norm": True},
            "no biases": {"attention_bias": False},
            "two shared experts": {"n_shared_experts": 2},
            "scale of experts": {"routed_scaling_factor": 2.5},
            "RoPE over whole heads": WHOLE_ROPE,
        },
    ),
    "gpt_oss": (
        {},
        {
            **HEADS,
            "RoPE not scaled": {"rope_parameters": {"rope_type": "default", "rope_theta": 1.5e5}},
            "other layers": {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
        },
    ),
}


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(family, what is told of it, overrides of its tiny config)."""
    for family, (common, variants) in FAMILIES.items():
        yield family, "as it is", common
        for told, overrides in variants.items():
            yield family, told, {**common, **overrides}


def refusal(folder: Path) -> str:
    """Why megarl does not serve this model; empty where it does, in a run as in `megarl serve`."""
    try:
        check_alone(folder, load_model_config(folder), get_platform("cpu"), "float32")
    except UserError as error:
        return str(error).removeprefix(f"{folder}: ")
    return ""


def difference(folder: Path, copies: Copies, logs: Path) -> float | None:
    """The largest between server and transformers over all tokens, nats; None where the server ends, or says no numbers."""
    generator = np.random.default_rng(0)
    probe = [generator.integers(5, VOCABULARY, length).tolist() for length in LENGTHS]
    spec = ServerSpec(folder, "float32", kv_tokens=4096, context_length=CONTEXT // 4)
    server = copies.server("server", spec, get_platform("cpu"), ProcessPlace(logs, KEY))
    server.start()
    try:
        server.wait_ready(START_S)
        answers = asyncio.run(probe_servers([server.endpoint], probe, START_S))
    except MegarlError:
        return None
    finally:
        server.stop()
    if answers.failed:
        return None
    model, [served] = HfModel(folder), answers.logprobs.values()
    return max(float(abs(model.logprobs(row) - found).max()) for row, found in zip(probe, served, strict=True))


def failed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Models that megarl would serve and that the server computes otherwise."""
    return [row for row in rows if not row["refused"] and not equal(row)]


def equal(row: dict[str, Any]) -> bool:
    """Whether the server computes what transformers does."""
    return row["difference"] is not None and row["difference"] <= BOUND


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="SGLang beside transformers, the same weights and sequences, float32")
    for column in ("family", "config", "difference, nats", "megarl"):
        table.add_column(column, justify="right" if "nats" in column else "left")
    for row in rows:
        needless = " (for nothing)" if equal(row) else ""
        apart = "no answer" if row["difference"] is None else f"{row['difference']:.1e}"
        verdict = f"refuses{needless}" if row["refused"] else "serves"
        table.add_row(row["family"], row["config"], apart, verdict)
    Console().print(table)


def main() -> None:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary, forked_servers() as copies:
        for number, (family, told, overrides) in enumerate(track(list(cases()), "models")):
            folder = Path(temporary) / f"model {number}"
            write_tiny_model(folder, family, **{key: value for key, value in overrides.items() if key != PUBLISHED})
            if overrides.get(PUBLISHED):
                as_published(folder)
            apart = difference(folder, copies, Path(temporary) / "logs")
            rows.append({"family": family, "config": told, "refused": refusal(folder), "difference": apart})
    show(rows)
    write("served_models", {"bound": BOUND, "rows": rows}, None)
    sys.exit(1 if failed(rows) else 0)


if __name__ == "__main__":
    no_options(__doc__)
    main()
