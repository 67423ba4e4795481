"""Reads from an HF config which layers have experts, and how tokens come to them. Without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.core.errors import UserError
from megarl.models.config import Moe
from megarl.models.family import Family
from megarl.models.family_experts import MoeKeys
from megarl.models.hf_fields import Fields
from megarl.models.hf_layers import listed

MOST_EXPERTS = 4096  # more than any model has; a list of what a model of a billion of them holds would never end
GREEDY, LIMITED = "greedy", "group_limited_greedy"  # DeepSeek-V2's


def required(fields: Fields, keys: MoeKeys) -> list[str]:
    """Keys without which a config describes no experts; none where it says that there are none."""
    if keys.switch is not None and not fields.flag(keys.switch, False):
        return []
    named = keys.num_shared, keys.shared_ffn_hidden_size, keys.scaling_factor, keys.num_groups, keys.top_groups
    wanted = [fields.first(keys.num_experts), keys.ffn_hidden_size, fields.first(keys.top_k)]
    wanted += [key for key in named if key]
    return wanted + (["first_k_dense_replace"] if keys.sparse == "after" else [])


def read_moe(fields: Fields, family: Family, layers: int) -> tuple[Moe | None, frozenset[int]]:
    """The experts, and the layers that have them. Raises UserError."""
    keys = family.moe
    if keys is None or (keys.switch is not None and not fields.flag(keys.switch, False)):
        return None, frozenset()
    sparse = _sparse_layers(fields, keys, layers)
    if not sparse:
        return None, sparse
    ffn = fields.count(keys.ffn_hidden_size)
    moe = Moe(
        num_experts=fields.count(fields.first(keys.num_experts), most=MOST_EXPERTS),
        top_k=_top_k(fields, keys),
        ffn_hidden_size=ffn,
        shared_ffn_hidden_size=_shared(fields, keys, ffn),
        score=keys.score,
        normalize=_normalizes(fields, keys),
        scaling_factor=fields.number(keys.scaling_factor, 1.0) if keys.scaling_factor else 1.0,
        **_groups(fields, keys),
        score_bias=keys.score_bias,
        shared_gate=keys.shared_ffn_hidden_size is not None and keys.shared_gate,
        biases=keys.biases,
        normed=keys.normed,
    )
    for key in keys.same_width:
        if any(width != ffn for width in _each(fields.get(key, ffn))):
            wanted = f"{ffn} is wanted, as {keys.ffn_hidden_size} has it, by which transformers sizes the experts"
            fields.refuse(key, fields.get(key), wanted)
    return _checked_routing(fields, moe), sparse


def _top_k(fields: Fields, keys: MoeKeys) -> int:
    """How many experts a token has: one number, or one for each layer, all the same."""
    found = {key: fields.get(key) for key in keys.top_k if fields.get(key) is not None}
    first, *others = found or keys.top_k[:1]
    for key in others:  # to transformers the same thing by another name: of two answers it hears the one or the other
        if found[key] != found[first]:
            fields.refuse(key, found[key], f"{found[first]}, as {first} has it, or no such key is wanted")
    if not (keys.each_layer and isinstance(found.get(first), list)):
        return fields.count(first)
    counts = fields.counts(first)
    if len(set(counts)) != 1:
        fields.refuse(first, found[first], "a whole number, or a list of it for each layer, is wanted")
    return Fields({first: counts[0]}, fields.path).count(first)


def _each(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _groups(fields: Fields, keys: MoeKeys) -> dict[str, Any]:
    """Of group-limited routing: all groups of whose experts a token may choose, and how many it may. Raises UserError."""
    if keys.num_groups is None or keys.top_groups is None:
        return {}
    groups, chosen = fields.count(keys.num_groups, 1), fields.count(keys.top_groups, 1)
    if keys.group_method is not None:
        method = fields.get(keys.group_method, GREEDY)
        if method not in (GREEDY, LIMITED):
            fields.refuse(keys.group_method, method, f"{GREEDY!r} or {LIMITED!r} is wanted")
        if method == GREEDY and groups != chosen:
            wanted = f"{groups}, as {keys.num_groups} has it, is wanted: where {keys.group_method} is {GREEDY!r}, SGLang would "
            fields.refuse(keys.top_groups, chosen, wanted + "limit the groups, and transformers does not")
    return {"num_groups": groups, "top_groups": chosen, "best_of_group": keys.group_method is not None}


def _shared(fields: Fields, keys: MoeKeys, ffn: int) -> int:
    """Width of the shared experts together. ffn: of one of the others."""
    if keys.shared_ffn_hidden_size is not None:
        return fields.count(keys.shared_ffn_hidden_size)
    return ffn * fields.count(keys.num_shared, 0, least=0) if keys.num_shared else 0


def _normalizes(fields: Fields, keys: MoeKeys) -> bool:
    """Whether chosen scores are divided by their sum."""
    if isinstance(keys.normalize, bool):
        return keys.normalize
    # null is an answer here, unlike elsewhere: transformers takes it as False.
    return fields.flag(keys.normalize, keys.normalize_unsaid and keys.normalize not in fields.raw)


def _sparse_layers(fields: Fields, keys: MoeKeys, layers: int) -> frozenset[int]:
    if keys.sparse == "all":
        return frozenset(range(layers))
    if keys.sparse == "after":
        return frozenset(range(fields.count("first_k_dense_replace", least=0), layers))
    if keys.sparse == "between":
        last = fields.count("moe_layer_end_index", -1, least=-1)
        behind = layers if last == -1 else min(last + 1, layers)
        return frozenset(range(fields.count("moe_layer_start_index", 1, least=0), behind))
    if keys.sparse == "named":
        return _named_sparse_layers(fields, layers)
    step, dense = fields.count("decoder_sparse_step", 1), fields.counts("mlp_only_layers")
    return frozenset(index for index in range(layers) if index not in dense and (index + 1) % step == 0)


def _named_sparse_layers(fields: Fields, layers: int) -> frozenset[int]:
    """The layers that `mlp_layer_types` gives experts. Raises UserError where servers would go by another key, and differ.

    transformers goes by it alone, and SGLang by first_k_dense_replace alone (0.5.21, models/glm4_moe_lite.py).
    """
    kinds = fields.words("mlp_layer_types")
    if fields.get("mlp_layer_types") is None:
        kinds = ("dense", *["sparse"] * (layers - 1))
    if len(kinds) != layers or not {"dense", "sparse"}.issuperset(kinds):
        wanted = f"one of 'dense' and 'sparse' for each of the {layers} layers (num_hidden_layers) is wanted"
        fields.refuse("mlp_layer_types", list(kinds), wanted)
    found = frozenset(index for index, kind in enumerate(kinds) if kind == "sparse")
    if fields.get("first_k_dense_replace") is not None:
        first = fields.count("first_k_dense_replace", least=0)
        if found != frozenset(range(first, layers)):
            wanted = (
                f"mlp_layer_types, by which transformers goes, has experts in {listed(found)}, and both have to agree"
            )
            fields.refuse("first_k_dense_replace", first, wanted)
    return found


def _checked_routing(fields: Fields, moe: Moe) -> Moe:
    """The same, with groups off where they limit nothing. Raises UserError for a routing that Megatron does not do."""
    problems = []
    if moe.top_k > moe.num_experts:
        problems.append(f"num_experts_per_tok={moe.top_k} of {moe.num_experts} experts")
    if moe.top_k == 1 and moe.normalize:
        problems.append("num_experts_per_tok=1 with norm_topk_prob=True (the router would have no gradient)")
    if moe.score == "sigmoid" and moe.top_k > 1 and not moe.normalize:
        problems.append("norm_topk_prob=False with sigmoid scores")
    if moe.num_groups == moe.top_groups:
        moe = replace(moe, num_groups=0, top_groups=0)
    elif moe.num_experts % moe.num_groups:
        problems.append(f"n_group={moe.num_groups}, which does not divide {moe.num_experts} experts")
    elif moe.best_of_group:
        if moe.top_groups > moe.num_groups or moe.top_k > moe.top_groups * (moe.num_experts // moe.num_groups):
            problems.append(
                f"n_group={moe.num_groups} and topk_group={moe.top_groups} with num_experts_per_tok={moe.top_k} of "
                f"{moe.num_experts} experts (the groups that are chosen have fewer)"
            )
    elif moe.top_groups > moe.num_groups or moe.top_k // moe.top_groups != 2 or moe.num_experts < 2 * moe.num_groups:
        problems.append(
            f"n_group={moe.num_groups} and topk_group={moe.top_groups} with num_experts_per_tok={moe.top_k} "
            "(a group counts its 2 best experts, and Megatron num_experts_per_tok // topk_group of them)"
        )
    if problems:
        raise UserError(f"{fields.path}: {', '.join(problems)} is not supported. Use a model without it.")
    return moe
