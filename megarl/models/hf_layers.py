"""Which layers of a model slide a window, and which have no positions, read from an HF config. Without torch."""

from __future__ import annotations

from typing import Any

from megarl.core.errors import UserError
from megarl.models.family import Family
from megarl.models.hf_fields import Fields, refuse_feature, shown
from megarl.models.weight_files import some

SLIDING, KINDS, PATTERN = "sliding_attention", "layer_types", "sliding_window_pattern"
UNROTATED, INTERVAL = "no_rope_layers", "no_rope_layer_interval"


def read_window(fields: Fields, family: Family, layers: int, architecture: str) -> tuple[int | None, frozenset[int]]:
    """The sliding window, and the layers that have it. Raises UserError."""
    if family.delta:  # no window, and kinds of layers of its own
        return None, frozenset()
    # null is an answer here, unlike elsewhere: no window.
    value = fields.raw.get("sliding_window", family.window_default)
    slides = value is not None and family.window != "never"
    if family.unrotated == "global":
        _check_kinds(fields, family, value, architecture)
    if family.window_switch:
        slides = slides and fields.flag("use_sliding_window", False)
    elif fields.get("use_sliding_window", False) and not slides:
        refuse_feature(
            fields,
            f"use_sliding_window={shown(fields.get('use_sliding_window'))} (sliding-window attention)",
            architecture,
        )
    ours = _local_layers(fields, family, layers) if slides else frozenset[int]()
    if fields.get(KINDS) is not None:
        named = _named_local_layers(fields, layers)
        if family.window in ("upper", "pattern") and slides:
            ours = named
        if family.global_heads and layers - 1 in named:
            wanted = "full_attention is wanted of the last layer: transformers makes it that, whatever stands there"
            fields.refuse(KINDS, SLIDING, wanted)
        if named != ours:
            given = f"layer_types with sliding_attention in {listed(named)}, where sliding_window={shown(value)}"
            refuse_feature(fields, f"{given} and the other keys have it in {listed(ours)},", architecture)
    return (fields.count("sliding_window", family.window_default) if ours else None), ours


def _named_local_layers(fields: Fields, layers: int) -> frozenset[int]:
    """The layers that `layer_types` gives a sliding window. Raises UserError where it does not speak of these layers."""
    return layers_of_kind(fields, layers, SLIDING)


def layers_of_kind(fields: Fields, layers: int, wanted: str) -> frozenset[int]:
    """The layers that `layer_types` gives this kind, where all others have full attention. Raises UserError."""
    kinds = fields.words(KINDS)
    if len(kinds) != layers:
        raise UserError(
            f"{fields.path}: layer_types has {len(kinds)} entries, and num_hidden_layers is {layers}: it wants one entry a "
            "layer. Export the model again."
        )
    if unknown := sorted(set(kinds) - {"full_attention", wanted}):
        raise UserError(
            f"{fields.path}: layer_types has {', '.join(map(shown, unknown))}; supported are 'full_attention' and "
            f"'{wanted}'. Use a model without it."
        )
    return frozenset(index for index, kind in enumerate(kinds) if kind == wanted)


def _check_kinds(fields: Fields, family: Family, window: Any, architecture: str) -> None:
    """Raise UserError where transformers, which reads a period in numbers alone, would build nothing of EXAONE 4's."""
    period = fields.raw.get(PATTERN, family.window_period)
    if fields.get(KINDS) is None and (window is None or type(period) is not int or period < 1):
        raise UserError(
            f"{fields.path} lacks {KINDS}, without which transformers builds no {architecture} whose sliding_window is "
            f"{shown(window)} and whose {PATTERN} is {shown(period)}. Write 'sliding_attention' or 'full_attention' there for "
            "each layer."
        )


def listed(layers: frozenset[int]) -> str:
    """Numbers of layers in a sentence."""
    return f"layers {some(list(map(str, sorted(layers))))}" if layers else "no layer"


def _local_layers(fields: Fields, family: Family, layers: int) -> frozenset[int]:
    if family.window == "upper":
        return frozenset(range(fields.count("max_window_layers", 28, least=0), layers))
    if family.window == "pattern":
        pattern = fields.get(PATTERN)  # transformers passes over the `_` that it writes itself
        if isinstance(pattern, str) and family.unrotated == "global":
            return frozenset()  # of no use to transformers, beside layer_types
        period = fields.count(PATTERN, family.window_period)
        found = frozenset(index for index in range(layers) if (index + 1) % period)
        return found - {layers - 1} if family.global_heads else found
    return frozenset(range(layers))


def period_of(local: frozenset[int], layers: int) -> int | None:
    """The period after which a layer without a window comes, and then alone; None where there is none."""
    fitting = (
        each for each in range(1, layers + 2) if all((n in local) == bool((n + 1) % each) for n in range(layers))
    )
    return next(fitting, None)


def read_unrotated(fields: Fields, family: Family, layers: int, local: frozenset[int]) -> frozenset[int]:
    """The layers without positions. local: those with a window. Raises UserError."""
    if family.unrotated == "global":  # where the config sets a window at all: null is an answer here
        slides = fields.raw.get("sliding_window", family.window_default) is not None
        return frozenset(range(layers)) - local if slides else frozenset()
    if family.unrotated != "named":
        return frozenset()
    if fields.get(UNROTATED) is None:
        interval = fields.count(INTERVAL, 4)
        return frozenset(index for index in range(layers) if (index + 1) % interval == 0)
    rotated = fields.counts(UNROTATED)
    if len(rotated) < layers or not {0, 1}.issuperset(rotated):
        wanted = f"1 for each of the {layers} layers (num_hidden_layers) that has RoPE and 0 for each other is wanted"
        fields.refuse(UNROTATED, list(rotated), wanted)
    return frozenset(index for index, has_rope in enumerate(rotated[:layers]) if not has_rope)
