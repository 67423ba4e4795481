"""Whether SGLang reads the rotary positions of a model's config as transformers does, before a device is taken.

`python -m bench.served_models` asks servers of such configs beside transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.core.json_file import read_object
from megarl.models.config import ModelConfig
from megarl.models.layout_check import BY_TRANSFORMERS

DROPPED = ("olmo3",)  # families of which SGLang drops rope_parameters
# Families of which it hears what stands outside (models/llama.py, exaone4.py, hunyuan.py, apertus.py).
OUTSIDE = ("llama", "mistral", "ministral3", "exaone4", "hunyuan_v1_dense", "hunyuan_v1_moe", "apertus")
BY_CONTEXT = ("yarn", "llama3")  # kinds of scaling that ask for the first context
ORIGINAL = "original_max_position_embeddings"
ITS_OWN = ("attn_factor", "extrapolation_factor")  # keys that SGLang multiplies by, and transformers passes over
MAGNITUDES, TURNS = ("mscale", "mscale_all_dim"), ("beta_fast", "beta_slow")


def check_served_rope(where: str, folder: Path, model: ModelConfig) -> None:
    """Raise UserError for a scaling that SGLang reads otherwise, with what to write in its place.

    Latent attention reads its own, and transformers' code what transformers reads.

    0.5.21 drops OLMo-3's rope_parameters, or ends over them (configs/olmo3.py); of what is not scaled it is told the rest
    (server_models). Of the first context it mostly reads the object of the scaling alone; of yarn it wants the factor, and knows
    no factor of attention but the one that follows from it (layers/rotary_embedding/factory.py, yarn.py).
    """
    kind, dropped = model.rope.kind, model.family in DROPPED
    unread = model.mla is not None or model.family in BY_TRANSFORMERS
    if unread or not (kind in BY_CONTEXT or (dropped and kind != "default")):
        return
    config = read_object(folder / "config.json", "Export the model again.")
    if dropped and not config.get("rope_scaling"):
        raise UserError(
            f"{where}: how the model's RoPE is scaled is in rope_parameters in its config.json, which SGLang does not read of "
            f"{model.architecture}. Write it in two keys there, as the published models have it: rope_theta, and rope_scaling "
            "with all the others."
        )
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    for problem in (*_of_contexts(scaling, model), *(_of_yarn(scaling, model) if kind == "yarn" else ())):
        raise UserError(f"{where}: RoPE is scaled by {kind} in its config.json. {problem}.")


def _of_contexts(scaling: Mapping[str, Any], model: ModelConfig) -> Iterator[str]:
    first, asked = model.rope.original_positions, model.rope.kind in BY_CONTEXT
    if asked and scaling and scaling.get(ORIGINAL, model.max_positions) != first and model.family not in OUTSIDE:
        yield (
            f"transformers takes {ORIGINAL} from outside of rope_scaling or rope_parameters, {first}, and SGLang from "
            f"inside. Write {first} inside"
        )


def _of_yarn(scaling: Mapping[str, Any], model: ModelConfig) -> Iterator[str]:
    from megarl.models.rope import attention_factor  # with torch

    rope = model.rope
    if scaling and scaling.get("factor") is None:
        yield f"SGLang wants `factor` among its keys. Write {rope.factor:g}, which transformers takes"
    for key in TURNS:
        if scaling.get(key, 0) is None:
            yield f"Its {key} is null, with which SGLang does not start. Remove it"
    if rope.attention_factor is not None:
        follows = attention_factor(replace(rope, attention_factor=None))
        if not math.isclose(rope.attention_factor, follows, rel_tol=1e-6):
            yield (
                f"Its attention_factor is {rope.attention_factor:g}, and SGLang takes {follows:g}, which follows from the "
                "other keys: it cannot serve this model. Take another"
            )
    for key in ITS_OWN:
        if scaling.get(key, 1) != 1:
            yield f"SGLang multiplies by {key}, {scaling[key]}, and transformers passes over it. Remove it"
    if any(scaling.get(key) == 0 for key in MAGNITUDES):
        yield f"{' and '.join(MAGNITUDES)} of 0 are none to transformers, and zero to SGLang. Remove them"
