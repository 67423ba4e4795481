"""What a server is told of LoRA adapters that it takes as they are. Without torch."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.core.errors import UserError
from megarl.models.config import ModelConfig
from megarl.models.lora_settings import LoraSettings, linear_of, target_of
from megarl.models.rules import rules

# The adapters that servers have at a time: each version comes under this name, in the place of the one before.
ADAPTER = "policy"
ATTENTION = ("linear_qkv", "linear_proj")
# Families whose adapters SGLang 0.5.21 was seen to serve as transformers computes them merged.
FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "ministral3", "mixtral")


@dataclass(frozen=True)
class ServedLora:
    """Room for adapters at a server. rank: the largest. modules: ends of HF's names of the linears."""

    rank: int
    modules: tuple[str, ...]

    def flags(self) -> list[str]:
        """As flags of sglang.launch_server. Two adapters: to SGLang, requests without any are of one too."""
        return [
            "--enable-lora",
            *("--max-lora-rank", str(self.rank)),
            *("--lora-target-modules", *self.modules),
            *("--max-loras-per-batch", "2"),
        ]


def served_lora(config: ModelConfig, settings: LoraSettings) -> ServedLora:
    """What servers of a model with these adapters need. Raises UserError where they cannot take them."""
    if config.family not in FAMILIES:
        raise UserError(
            f"`sync.lora`: adapters alone are for servers of {', '.join(FAMILIES)}; this one is "
            f"{config.family}. Set it to merged."
        )
    others = [target for target in settings.targets if target not in ATTENTION]
    if config.moe is not None and others:
        raise UserError(
            f"`sync.lora`: servers of a mixture of experts take adapters of {' and '.join(ATTENTION)} alone, and "
            f"actor.lora.targets has {', '.join(others)}. Set it to merged."
        )
    modules = {
        source.name.removesuffix(".weight").rpartition(".")[2]
        for rule in rules(config, "torch")
        if target_of(linear_of(rule)) in settings.targets
        for source in rule.sources
        if source.name.endswith(".weight")
    }
    return ServedLora(settings.rank, tuple(sorted(modules)))
