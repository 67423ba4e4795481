"""Reads rotary positions from an HF config, as either generation of transformers writes them. Without torch.

transformers 5 writes `rope_parameters`, one object or one for each kind of layer; earlier ones `rope_theta` beside
`rope_scaling`, and Gemma 3 `rope_local_base_freq` for its local layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast

from megarl.core.errors import UserError
from megarl.models.config import Rope
from megarl.models.family import Family
from megarl.models.hf_fields import Fields, shown

Kind = Literal["default", "linear", "llama3", "yarn", "longrope"]
KINDS: tuple[Kind, ...] = ("default", "linear", "llama3", "yarn")
LONGROPE_KINDS: tuple[Kind, ...] = ("default", "longrope")  # of a family that transformers scales in no other way
SHARE = "partial_rotary_factor"
LAYER_KINDS = ("full_attention", "sliding_attention")
LOCAL_THETA = 10000.0  # Gemma 3's, where no key says
ALPHA, DYNAMIC = "alpha", "dynamic"
LARGEST = 80.0  # logarithm of a base, which is a number of float32
BETA, ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"


def read_ropes(fields: Fields, family: Family, rotary_dim: int | None, head_dim: int) -> tuple[Rope, Rope | None]:
    """Rotary positions of a model, and those of its local layers where a family's have their own. Raises UserError.

    rotary_dim: elements of a head that are rotated, in a family that may rotate a part. head_dim: all of them.
    """
    if family.alpha_rope:
        return read_alpha_rope(fields, family.theta, head_dim), None
    if family.gemma:
        return read_layered_rope(fields, family.theta)
    if family.global_heads:
        return read_proportional_ropes(fields)
    if family.unscaled_locally:
        return read_global_rope(fields, family.theta)
    longrope = rotary_dim if family.longrope else None
    partial = rotary_dim is not None
    rope = read_rope(fields, family.theta, partial=partial, longrope=longrope, unsaid=family.rope_unsaid)
    return _by_position(fields, family.rope_unsaid, rope) if family.position_scale else rope, None


def read_rope(
    fields: Fields,
    default_theta: float,
    *,
    partial: bool = False,
    longrope: int | None = None,
    unsaid: Mapping[str, Any] | None = None,
) -> Rope:
    """Rotary positions of a model whose layers all have the same. partial: it may turn a part of each head.

    longrope: elements of a head that are rotated, in a family that is scaled by LongRoPE alone. unsaid: how positions are scaled
    where no key says. Raises UserError.
    """
    part = _described(fields, unsaid)
    rope = _rope(fields, part, fields.raw.get("rope_theta", default_theta), partial=partial, longrope=longrope)
    if partial and rope.kind == "yarn":  # whose factor would be that of the rotated part alone
        raise UserError(
            f"{fields.path}: RoPE scaling of type 'yarn' is not supported where RoPE turns a part of each head."
        )
    return rope


def read_alpha_rope(fields: Fields, default_theta: float, head_dim: int) -> Rope:
    """Those of a model whose longer context comes of a larger base: theta alpha^(d / (d - 2)), d the head's width (Hunyuan).

    By yarn cosine and sine would be scaled, before norms that take every scale away again. Raises UserError.
    """
    part = _described(fields)
    theta = fields.raw.get("rope_theta", default_theta)
    if _kind(part) == DYNAMIC and part.get(ALPHA):
        if head_dim <= 2:
            fields.refuse("head_dim", head_dim, f"more than 2 elements are wanted by RoPE scaling of type {DYNAMIC!r}")
        base = _rope(fields, Fields({**part.raw, "rope_type": "default"}, part.path), theta).theta
        alpha, power = part.number(ALPHA), head_dim / (head_dim - 2)
        if not 0 < math.log(base) + power * math.log(alpha) < LARGEST:
            part.refuse(ALPHA, alpha, f"a factor of the base {base:g} is wanted that leaves it a number over 1")
        return Rope(base * alpha**power)
    if _kind(part) in (DYNAMIC, "yarn"):
        told = "without alpha" if _kind(part) == DYNAMIC else "before the norms of queries and keys"
        raise UserError(f"{part.path}: RoPE scaling of type {shown(_kind(part))} {told} is not supported.")
    return _rope(fields, part, theta)


def read_rotary_dim(fields: Fields, family: Family, head_dim: int) -> int | None:
    """How many elements of a head are rotated; None in a family that always rotates all. Raises UserError."""
    if family.rotary_share is None:
        return None
    part, width = _described(fields), _rotary_width(fields, family, head_dim)
    unsaid = family.rotary_share if width is None else width / head_dim
    # What stands outside, to transformers; where nothing does it takes its own, of families where it has one.
    outside = fields.raw.get(SHARE, None if family.longrope or family.rotary_width else unsaid)
    share = part.get(SHARE, fields.raw.get(SHARE, unsaid))
    if _kind(part) != "default" and None not in (share, outside) and share != outside:
        part.refuse(
            SHARE,
            share,
            f"where RoPE is scaled, transformers takes {shown(outside)}, that of outside of rope_parameters (or its own, where "
            "none stands there), and SGLang that of inside: both have to be there and to agree",
        )
    if share is None:  # an answer here, unlike elsewhere
        raise UserError(
            f"{fields.path}: {SHARE} is null, which neither transformers nor SGLang takes. Write the share of each head that is "
            "rotated in its place: 1.0 is all of it."
        )
    share = Fields({SHARE: share}, fields.path).number(SHARE)
    rotated = int(min(share, 2.0) * head_dim)
    if share > 1 or rotated < 2 or rotated % 2:
        fields.refuse(
            SHARE, share, f"a share of the head's {head_dim} elements is wanted that is an even number of them"
        )
    if family.rotary_width is not None and width not in (None, rotated):  # transformers reads the one, SGLang the other
        fields.refuse(
            family.rotary_width, width, f"{rotated} is wanted, which {SHARE} {share} is of {head_dim} elements"
        )
    return rotated


def _rotary_width(fields: Fields, family: Family, head_dim: int) -> int | None:
    """The same as a number, where the family has a key for that and the config has it. Raises UserError."""
    key = family.rotary_width
    if key is None or fields.get(key) is None:
        return None
    width = fields.count(key, least=2)
    if width > head_dim or width % 2:
        fields.refuse(key, width, f"an even number of the head's {head_dim} elements is wanted")
    return width


def _by_position(fields: Fields, unsaid: Mapping[str, Any] | None, rope: Rope) -> Rope:
    """The same of a family whose queries grow with their position. Raises UserError where what says by how much is missing."""
    part = _described(fields, unsaid)
    if (beta := part.optional_number(BETA)) is None:
        part.refuse(
            BETA, None, "a number from 0 is wanted in rope_parameters, without which transformers does not compute"
        )
    original = rope.original_positions or part.count(ORIGINAL)
    # Of RoPE that has no use for it, transformers reads that of the object.
    if fields.get(ORIGINAL, original) != original:
        fields.refuse(
            ORIGINAL, fields.get(ORIGINAL), f"{original}, as in rope_parameters, or none is wanted beside them"
        )
    return replace(rope, original_positions=original, position_beta=beta)


def _described(fields: Fields, unsaid: Mapping[str, Any] | None = None) -> Fields:
    """The object that describes the scaling. Where somebody has put one beside the other, transformers hears the older.

    unsaid: where there is none. An empty rope_scaling says nothing to transformers, and an empty rope_parameters that nothing
    is scaled.
    """
    if unsaid is not None and not fields.get("rope_scaling") and fields.get("rope_parameters") is None:
        return Fields(unsaid, fields.path)
    part = fields.part("rope_scaling")
    return part if part.raw else fields.part("rope_parameters")


def read_layered_rope(fields: Fields, default_theta: float) -> tuple[Rope, Rope]:
    """Those of global layers, and those of local ones. Raises UserError."""
    if (parameters := fields.part("rope_parameters")).get("full_attention") or parameters.get("sliding_attention"):
        everywhere, local = parameters.part("full_attention"), parameters.part("sliding_attention")
        if fields.part("rope_scaling").raw:
            raise UserError(
                f"{fields.path} has rope_scaling beside rope_parameters, which says how both kinds of layers rotate. Put the "
                "scaling into rope_parameters.full_attention, and remove rope_scaling."
            )
    else:
        everywhere, local = fields.part("rope_scaling"), Fields({}, fields.path)
        if "rope_type" not in everywhere.raw and _kind(everywhere) != "default":
            everywhere.refuse(
                "type",
                _kind(everywhere),
                "in rope_scaling, rope_type is wanted in its place: where layers differ in RoPE, transformers passes over the "
                "older name, and scales nothing",
            )
    # Of objects for kinds of layers, transformers does not hear what stands outside.
    fields = Fields({key: value for key, value in fields.raw.items() if key != ORIGINAL}, fields.path)
    ropes = (
        _rope(fields, everywhere, fields.raw.get("rope_theta", default_theta)),
        _rope(fields, local, fields.get("rope_local_base_freq", LOCAL_THETA)),
    )
    for rope in ropes:
        if rope.kind == "yarn":
            raise UserError(f"{fields.path}: RoPE scaling of type 'yarn' is not supported where layers differ in RoPE.")
    return ropes


def read_proportional_ropes(fields: Fields) -> tuple[Rope, Rope]:
    """Those of global layers, which turn some frequencies of each head and leave the others, and of local ones (Gemma 4).

    transformers and SGLang hear the objects for kinds of layers alone. Raises UserError.
    """
    if fields.get("rope_scaling"):
        fields.refuse(
            "rope_scaling", fields.get("rope_scaling"), "rope_parameters alone are wanted: nobody reads this key"
        )
    if fields.get("rope_parameters") is None:
        return Rope(1e6, "proportional", share=0.25), Rope(LOCAL_THETA)
    parts = [fields.part("rope_parameters").part(kind) for kind in LAYER_KINDS]
    for part, kind, wanted in zip(parts, LAYER_KINDS, ("proportional", "default"), strict=True):
        if part.raw.get("rope_type") != wanted:
            found = f"{kind} with rope_type {shown(part.raw.get('rope_type'))}"
            fields.refuse(
                "rope_parameters", found, f"of {kind} {wanted!r} is wanted, with rope_theta; no other is supported"
            )
        if part.number("rope_theta") <= 1:
            part.refuse("rope_theta", part.get("rope_theta"), "a number over 1 is wanted")
    everywhere, local = parts
    if everywhere.number("factor", 1.0) != 1.0:
        everywhere.refuse(
            "factor", everywhere.get("factor"), "transformers divides by it, and SGLang does not: 1 is wanted"
        )
    share = everywhere.number(SHARE, 1.0)
    width = fields.count("global_head_dim", 512)
    if share > 1 or int(share * width // 2) < 1:
        everywhere.refuse(SHARE, share, f"a share of the {width // 2} pairs of a head is wanted that is one at least")
    if local.get(SHARE, 1.0) != 1.0:
        local.refuse(SHARE, local.get(SHARE), "of layers with a window RoPE turns whole heads: 1 is wanted")
    return Rope(everywhere.number("rope_theta"), "proportional", share=share), Rope(local.number("rope_theta"))


def read_global_rope(fields: Fields, default_theta: float) -> tuple[Rope, Rope | None]:
    """Those of global layers, and of local ones, whose positions are never scaled (OLMo-3). Raises UserError.

    So OLMo-3 was trained, and so SGLang and transformers from 5.23 compute it; transformers 5.12 scales all layers.
    """
    if any(fields.part("rope_parameters").get(kind) is not None for kind in LAYER_KINDS):
        raise UserError(
            f"{fields.path}: rope_parameters has an object for each kind of layers, and SGLang reads one alone, by which it "
            "scales the global layers. Write what is in rope_parameters.full_attention in its place."
        )
    rope = read_rope(fields, default_theta)
    return rope, None if rope.kind == "default" else Rope(rope.theta)


def _longrope(fields: Fields, part: Fields, base: float, width: int) -> Rope:
    """Phi-3's (arXiv 2402.13753), with its factors for short sequences. width: elements of a head that are rotated.

    The first training's context is the key at the top of the config, 4096 where there is none: transformers passes over that of
    the object. Of the scale of attention it and SGLang agree where it follows from the two contexts.
    """
    positions = fields.count("max_position_embeddings")
    original = fields.count("original_max_position_embeddings", 4096, least=2)
    for key in ("attention_factor", "short_mscale", "long_mscale"):
        if part.get(key) is not None:
            raise UserError(
                f"{part.path}: {key} beside RoPE scaling of type 'longrope' is not supported: transformers and SGLang scale "
                "attention differently with it. Use a model without it."
            )
    if part.number("factor", positions / original) != positions / original:
        part.refuse(
            "factor", part.get("factor"), f"SGLang takes {positions}/{original}, of the two contexts; that is wanted"
        )
    short = _divisors(part, "short_factor", width // 2)
    _divisors(part, "long_factor", width // 2)
    return Rope(base, "longrope", factor=positions / original, original_positions=original, short_factors=short)


def _divisors(part: Fields, key: str, number: int) -> tuple[float, ...]:
    """One for each frequency. Raises UserError."""
    found = part.get(key)
    if not isinstance(found, list) or len(found) != number:
        part.refuse(key, found, f"a list of {number} numbers is wanted, one for each pair that is rotated")
    return tuple(Fields({key: each}, part.path).number(key) for each in found)


def _kind(part: Fields) -> Any:
    """How an object that describes the scaling calls it. null is a name to transformers, which knows none of it."""
    return part.raw.get("rope_type", part.raw.get("type", "default"))


def _rope(fields: Fields, part: Fields, theta: float, *, partial: bool = False, longrope: int | None = None) -> Rope:
    """part: the object that describes the scaling; fields: the config around it. longrope: as in `read_rope`."""
    kind = _kind(part)
    kinds = KINDS if longrope is None else LONGROPE_KINDS
    if kind not in kinds:
        raise UserError(
            f"{part.path}: RoPE scaling of type {shown(kind)} is not supported; these are: {', '.join(kinds)}."
        )
    if not partial and (share := part.get(SHARE, 1.0)) != 1.0:
        raise UserError(
            f"{part.path}: {SHARE}={shown(share)} (RoPE over a part of each head) is not supported. "
            "Use a model without it."
        )
    base = Fields({"rope_theta": theta, **part.raw}, part.path).number("rope_theta")  # null is no base to transformers
    if base <= 1:
        part.refuse("rope_theta", base, "a number over 1 is wanted")
    if kind == "default":
        return Rope(base)
    if longrope is not None:
        return _longrope(fields, part, base, longrope)
    all_dim = part.optional_number("mscale_all_dim")
    if kind == "linear":
        return Rope(base, "linear", factor=part.number("factor", least=1.0), mscale_all_dim=all_dim)
    positions = fields.count("max_position_embeddings")
    original = fields.get("original_max_position_embeddings", part.get("original_max_position_embeddings", positions))
    original = Fields({"original_max_position_embeddings": original}, part.path).count(
        "original_max_position_embeddings"
    )
    if kind == "llama3":
        low, high = part.number("low_freq_factor"), part.number("high_freq_factor")
        if low >= high:
            part.refuse("low_freq_factor", low, f"less than high_freq_factor {high} is wanted")
        return Rope(
            base,
            "llama3",
            factor=part.number("factor", least=1.0),
            original_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
            mscale_all_dim=all_dim,
        )
    return Rope(
        base,
        cast(Kind, kind),
        factor=part.number("factor", positions / original, least=1.0),
        original_positions=original,
        beta_fast=part.number("beta_fast", 32.0),
        beta_slow=part.number("beta_slow", 1.0),
        mscale=part.optional_number("mscale"),
        mscale_all_dim=all_dim,
        attention_factor=None if part.get("attention_factor") is None else part.number("attention_factor"),
        truncate=part.flag("truncate", "truncate" not in part.raw),  # null is no to transformers
    )
