"""Reads from an HF config the heads of layers without a window, where they have others than those with one. Without torch.

So it is in Gemma 4: wider heads, fewer for keys, whose linear may give the values too. What its small models have beside that
(embeddings for each layer) is refused here: it is there where no key says.
"""

from __future__ import annotations

from typing import Any

from megarl.core.errors import UserError
from megarl.models.config import GlobalHeads
from megarl.models.family import Family
from megarl.models.hf_fields import Fields, refuse_feature

HEAD_DIM, KV_HEADS, SHARED = "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"
OF_LAYERS, WIDTH = "hidden_size_per_layer_input", 256


def read_global(fields: Fields, family: Family, architecture: str) -> dict[str, Any]:
    """Fields of a ModelConfig; none where all layers have the same heads. Raises UserError."""
    if not family.global_heads:
        return {}
    if fields.raw.get("sliding_window", 0) is None:
        fields.refuse("sliding_window", None, "a whole number is wanted: transformers makes no model of null")
    if fields.count(OF_LAYERS, WIDTH, least=0):
        said = "" if OF_LAYERS in fields.raw else ", where no key says"
        refuse_feature(
            fields, f"{OF_LAYERS}={fields.get(OF_LAYERS, WIDTH)}{said} (embeddings of each layer)", architecture
        )
    heads, shared = fields.count("num_attention_heads"), fields.flag(SHARED, False)
    # Where values have a linear of their own, transformers passes over the number.
    kv_heads = fields.count(KV_HEADS if shared else "num_key_value_heads")
    if heads % kv_heads:
        raise UserError(f"{fields.path}: {KV_HEADS} {kv_heads} does not divide num_attention_heads {heads}.")
    width = fields.count(HEAD_DIM, 512, least=2)
    if width % 2:
        fields.refuse(HEAD_DIM, width, "RoPE turns pairs, so an even number is wanted")
    return {"global_heads": GlobalHeads(kv_heads, width, shared), "value_norm": True, "layer_scale": True}
