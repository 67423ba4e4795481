"""What each of a recipe's own servers is told. It starts nothing: megarl/run/session.py does."""

from __future__ import annotations

from megarl.models.lora_served import ServedLora
from megarl.recipe.rollout_rules import longest_served
from megarl.recipe.schema import Recipe
from megarl.recipe.speculation_rules import has_draft
from megarl.serving.server import ServerSpec
from megarl.serving.server_models import KEPT_DRAFT, ROUTING


def server_spec(recipe: Recipe, *, lora: ServedLora | None = None, threads: int | None = None) -> ServerSpec:
    """One server, wherever it is. lora: room for adapters that are sent alone. threads: of each of its ranks."""
    settings = recipe.rollout
    return ServerSpec(
        model=recipe.model.path.resolve(),
        dtype=recipe.model.dtype,
        tp=settings.tp,
        max_running_requests=settings.max_running_requests,
        kv_tokens=settings.kv_tokens,
        context_length=longest_served(recipe),
        seed=recipe.run.seed,
        offloaded=bool(settings.offload),
        deterministic=settings.deterministic,
        quantized=settings.quantization is not None,
        held_s=recipe.deadlines.sync_s if settings.in_flight == "in_place" and settings.keep_kv else None,
        lora=lora,
        tower_learns=not recipe.actor.optimizer.freeze_vision_tower,
        threads=threads,
        extra=(*settings.server_args, *_own_flags(recipe)),
    )


def _own_flags(recipe: Recipe) -> list[str]:
    """Flags of SGLang that follow from other keys."""
    flags = [ROUTING] if recipe.actor.routing_replay else []
    # Syncs send the policy's weights alone: a draft's would be gone with the memory that is given back.
    kept = "weights" in recipe.rollout.offload and has_draft(recipe.rollout.server_args)
    return [*flags, KEPT_DRAFT] if kept else flags
