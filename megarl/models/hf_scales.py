"""Reads from an HF config what a family multiplies its activations by. Without torch."""

from __future__ import annotations

from typing import Any

from megarl.models.families import Family
from megarl.models.hf_fields import Fields


def read_scales(fields: Fields, family: Family, hidden: int) -> dict[str, Any]:
    """Fields of a ModelConfig; none where a family scales nothing but the logits of attention, by its heads' width.

    Granite's are those of maximal update parametrization (arXiv 2203.03466), of which each is 1 where no key says.
    Raises UserError.
    """
    if family.gemma:
        return {"embedding_scale": hidden**0.5, "query_scale": fields.number("query_pre_attn_scalar", 256.0) ** -0.5}
    if family.multipliers:
        return {
            "embedding_scale": fields.number("embedding_multiplier", 1.0),
            "query_scale": fields.number("attention_multiplier", 1.0),
            "residual_scale": fields.number("residual_multiplier", 1.0),
            "logit_scale": 1.0 / fields.number("logits_scaling", 1.0),
        }
    return {}
