"""Whether a model can be cut as a layout says, before anything is built; and which layouts near it would do. Without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from megarl.core.errors import UserError
from megarl.core.layout import Layout, stage_layers
from megarl.models.config import ModelConfig

SHOWN = 3
BY_TRANSFORMERS = ("smollm3", "seed_oss")  # families that SGLang has no code of its own for
UNCUT_BY_SERVERS = ("olmoe",)  # families that SGLang serves on one device alone
# Families whose heads SGLang makes as wide as the hidden size over their number, whatever head_dim says.
NO_HEAD_DIM = ("qwen2_moe", "mixtral", "olmo2", "olmo3", "exaone4", "olmoe", "granitemoe")


def check_layout(config: ModelConfig, layout: Layout, key: str) -> None:
    """Raise UserError, with the numbers and the nearest layouts that work. key: the recipe's section, `actor.parallel`."""
    problems = layout_problems(config, layout)
    if problems:
        near = [f"{option} " for option in nearest_layouts(config, layout)]
        way_out = f"Nearest layouts that work: {'; '.join(map(str.strip, near))}." if near else "No layout works."
        raise UserError(
            f"{key} ({layout}, {layout.world_size} devices) cannot be for this model: {'; '.join(problems)}. {way_out}"
        )


def cuts_servers(config: ModelConfig, tp: int, *, pads: bool = False) -> bool:
    """SGLang cuts heads and MLP columns evenly, and repeats key-value heads where there are fewer than ranks.

    pads: whether it fills their number up with zeros instead, and that of all heads alike, as on a CPU (Platform.pads_weights).
    Those of the NO_HEAD_DIM get narrower by it than the model's, and the server ends: at its start, or the first request
    (0.5.21, configs/update_config.py).

    Not where a norm goes over all of them: it would meet some more than once (0.5.21, models/olmo2.py); nor where it serves a
    family by transformers' code (models/transformers.py). OLMoE's norms it builds as wide as all heads on each
    rank, which one alone has (models/olmoe.py).
    """
    if config.family in UNCUT_BY_SERVERS:
        return tp == 1
    even = config.num_heads % tp == 0 and config.ffn_hidden_size % tp == 0
    even = even and (config.delta is None or config.delta.num_key_heads % tp == 0)
    repeats = not config.whole_qk_norm and config.family not in BY_TRANSFORMERS
    repeats = repeats and not (pads and config.family in NO_HEAD_DIM)
    of_each = [kind.num_kv_heads for _, kind in config.kinds_of_heads]
    return even and (config.mla is not None or all(n % tp == 0 or (repeats and tp % n == 0) for n in of_each))


def check_server_layout(config: ModelConfig, tp: int, name: str = "rollout.tp", *, pads: bool = False) -> None:
    """Raise UserError where a server of so many devices cannot be cut evenly, with the sizes that can. name: what said it.

    pads: see `cuts_servers`.
    """
    if config.family in UNCUT_BY_SERVERS and tp > 1:
        raise UserError(
            f"{name} {tp}: SGLang serves {config.architecture} on one device alone: on several its norms of queries and keys "
            "would be wider than a rank's heads. Set it to 1, and have more servers."
        )
    valid = ", ".join(str(size) for size in range(1, config.num_heads + 1) if cuts_servers(config, size, pads=pads))
    if cuts_servers(config, tp) and not cuts_servers(config, tp, pads=pads):
        raise UserError(
            f"{name} {tp}: the model has {config.num_kv_heads} key-value heads, and on a CPU SGLang fills their number up to "
            f"{tp}, and makes all heads of {config.architecture} narrower by that, with which no server answers. Sizes that "
            f"work: {valid}."
        )
    if not cuts_servers(config, tp):
        raise UserError(
            f"{name} {tp} does not divide the model: it has {config.num_heads} attention heads, "
            f"{config.num_kv_heads} key-value heads and {config.ffn_hidden_size} MLP columns. Sizes that work: {valid}."
        )


def layout_problems(config: ModelConfig, layout: Layout) -> list[str]:
    """What stands against a layout, one sentence each; empty when nothing does."""
    problems = _tensor_problems(config, layout.tp) + _expert_problems(config, layout)
    if config.delta is not None and layout.cp > 1:
        problems.append(
            f"cp {layout.cp} would cut sequences, through which the state of its linear attention runs (tp, pp and dp do not)"
        )
    try:
        first = len(stage_layers(layout, config.num_layers)[0][0])
    except UserError as error:
        return [*problems, str(error).split(":", maxsplit=1)[0]]
    vision = config.vision
    if vision is not None and vision.tower and first < vision.deepstack and layout.pp > 1:
        problems.append(
            f"the first pipeline stage ends behind layer {first}, and features of images come behind {vision.deepstack} layers, "
            "whose gradients a vision tower that learns has to have there (first_stage_layers says how many it has)"
        )
    return problems


def _tensor_problems(config: ModelConfig, tp: int) -> list[str]:
    sizes = {"attention heads": config.num_heads, "MLP columns": config.ffn_hidden_size}
    if config.mla is None:
        # Ranks that cut through a group of heads cut the rows of all queries, keys and values evenly.
        for _, kind in config.kinds_of_heads:
            queries, keys = (2 if config.output_gate else 1), (1 if kind.keys_as_values else 2)
            of_these = f", of {kind.num_kv_heads} key-value heads of {kind.head_dim}," if config.global_heads else ""
            rows = (config.num_heads * queries + keys * kind.num_kv_heads) * kind.head_dim
            sizes[f"rows of queries, keys and values{of_these}"] = rows
    if config.moe is not None and config.moe.shared_ffn_hidden_size:
        sizes["columns of the shared experts"] = config.moe.shared_ffn_hidden_size
    if config.mla is not None:
        sizes["compressed key-value columns"] = config.mla.kv_rank + config.mla.rope_dim
        if config.mla.q_rank is not None:
            sizes["compressed query columns"] = config.mla.q_rank
    if config.delta is not None:
        sizes["key heads of linear attention"] = config.delta.num_key_heads
    uneven = [f"{size} {what}" for what, size in sizes.items() if size % tp]
    for heads in dict.fromkeys(kind.num_kv_heads for _, kind in config.kinds_of_heads):
        if config.whole_qk_norm and heads % tp:  # ranks that repeat a head would count it more than once in its norm
            uneven.append(f"{heads} key-value heads, over all of which their norm goes")
        elif config.mla is None and heads % tp and tp % heads:
            uneven.append(f"{heads} key-value heads (nor do they divide it)")
    return [f"tp {tp} does not divide {', '.join(uneven)}"] if uneven else []


def _expert_problems(config: ModelConfig, layout: Layout) -> list[str]:
    moe = config.moe
    if moe is None:
        asked = [f"{name} {size}" for name, size in (("ep", layout.ep), ("etp", layout.etp)) if size > 1]
        return [f"{' and '.join(asked)} is for experts, and the model has none"] if asked else []
    problems = []
    if moe.num_experts % layout.ep:
        problems.append(f"ep {layout.ep} does not divide {moe.num_experts} experts")
    if moe.biases and layout.etp > 1:
        problems.append(f"etp {layout.etp} is not for experts with biases (megatron-core refuses it)")
    if moe.ffn_hidden_size % layout.etp:
        problems.append(f"etp {layout.etp} does not divide {moe.ffn_hidden_size} columns of an expert")
    if layout.tp > 1 and not layout.sequence_parallel:
        problems.append("experts under tp need sequence_parallel: true")
    return problems


def nearest_layouts(config: ModelConfig, wanted: Layout) -> list[Layout]:
    """Layouts of as many devices that work, nearest first: by how many times each axis has to be doubled or halved."""

    def distance(option: Layout) -> tuple[float, int]:
        axes = ((getattr(option, axis), getattr(wanted, axis)) for axis in ("tp", "pp", "cp", "ep", "etp", "vpp"))
        changed = sum(getattr(option, f) != getattr(wanted, f) for f in ("first_stage_layers", "last_stage_layers"))
        return sum(abs(math.log2(a / b)) for a, b in axes), changed

    return sorted(_working(config, wanted), key=distance)[:SHOWN]


def _working(config: ModelConfig, wanted: Layout) -> Iterator[Layout]:
    sizes = [size for size in range(1, wanted.world_size + 1) if wanted.world_size % size == 0]
    experts = sizes if config.moe is not None else [1]
    for tp, pp, cp, ep, etp in product(sizes, sizes, sizes, experts, experts):
        for vpp in sorted({1, wanted.vpp}) if pp > 1 else [1]:
            parallel = tp > 1 and (wanted.sequence_parallel or config.moe is not None)
            try:
                option = replace(
                    wanted,
                    tp=tp,
                    pp=pp,
                    cp=cp,
                    ep=ep,
                    etp=etp,
                    vpp=vpp,
                    sequence_parallel=parallel,
                    first_stage_layers=None,
                    last_stage_layers=None,
                )
            except UserError:
                continue
            if not layout_problems(config, option):
                yield option
