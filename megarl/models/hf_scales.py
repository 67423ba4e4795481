"""Reads from an HF config what a family multiplies its activations by. Without torch."""

from __future__ import annotations

from typing import Any

from megarl.models.family import Family
from megarl.models.hf_fields import Fields


def read_scales(fields: Fields, family: Family, hidden: int) -> dict[str, Any]:
    """Fields of a ModelConfig; none where a family scales nothing but the logits of attention, by its heads' width.

    Granite's are those of maximal update parametrization (arXiv 2203.03466), of which each is 1 where no key says.
    Raises UserError.
    """
    if family.gemma:
        return {"embedding_scale": hidden**0.5, "query_scale": fields.number("query_pre_attn_scalar", 256.0) ** -0.5}
    if family.global_heads:
        cap = fields.optional_number("final_logit_softcapping")
        if cap == 0:
            fields.refuse("final_logit_softcapping", cap, "a number over 0, or null, which is none, is wanted")
        return {"embedding_scale": hidden**0.5, "query_scale": 1.0, "logit_cap": cap}
    if family.multipliers:
        return {
            "embedding_scale": _multiplier(fields, "embedding_multiplier"),
            "query_scale": _multiplier(fields, "attention_multiplier"),
            "residual_scale": _multiplier(fields, "residual_multiplier"),
            "logit_scale": 1.0 / _multiplier(fields, "logits_scaling"),
        }
    return {}


def _multiplier(fields: Fields, key: str) -> float:
    """1 where no key says. null is no number: transformers takes the heads' width for attention's, or ends. Raises UserError."""
    return fields.number(key, 1.0 if key not in fields.raw else None)
