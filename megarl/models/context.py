"""Whether a model's context holds the longest sample: asked by the planner and before a run starts."""

from __future__ import annotations

from megarl.core.errors import UserError
from megarl.models.config import ModelConfig

# What a sample of a run is made of at most, by the recipe's keys.
SAMPLE_PARTS = "data.max_prompt_tokens + rollout.max_response_tokens"


def check_context(model: ModelConfig, longest: int, parts: str, whose: str = "the model") -> None:
    """parts: what the longest sample is made of. whose: the model, in words. Raises UserError where it is longer."""
    if longest > model.context < model.max_positions:
        raise UserError(
            f"A sample of up to {longest} tokens ({parts}) is longer than the {model.context} tokens for which the RoPE of "
            f"{whose}, of type longrope, has its short factors (original_max_position_embeddings in its config.json). The long "
            "ones are not supported: for which sequences of a batch they count, transformers and SGLang decide differently. "
            f"Lower the limit by {longest - model.context} tokens, or name another model."
        )
    if longest > model.max_positions:
        raise UserError(
            f"A sample of up to {longest} tokens ({parts}) is longer than the context of {model.max_positions} tokens of "
            f"{whose} (max_position_embeddings in its config.json). Lower the limit by {longest - model.max_positions} "
            "tokens, or name a model with a longer context."
        )
