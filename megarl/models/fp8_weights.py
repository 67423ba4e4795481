"""Which weights servers hold in FP8 where a run quantises them, and what a server is told of it. Without torch.

As DeepSeek-V3 and Qwen3-FP8 are published: the linears of layers, attention's and MLPs', all experts among them; not
embeddings, head, norms, biases, routers and gates of shared experts. How numbers become FP8 is in fp8_quantize.py; folders that
have it, in hf_fp8.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megarl.core.errors import UserError
from megarl.models.config import ModelConfig
from megarl.models.hf_fp8 import FORMAT, METHOD, QUANTIZATION
from megarl.models.rule_table import SHARED_GATE
from megarl.models.rules import Rule, rules

BLOCK = 128  # rows and columns that share a scale
# SGLang 0.5.21 renames their scales as if there were one for each tensor (models/llama.py), finds none of that name, and drops
# them: every weight would be multiplied by the smallest float32.
UNSCALED_FAMILIES = ("llama", "mistral", "ministral3", "phi3")
# Of whose experts SGLang loads no scales of blocks (models/gpt_oss.py, granitemoe.py).
STACKED_FAMILIES = ("gpt_oss", "granitemoe")
LINEAR_FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # of which it was not tried what SGLang holds in FP8
KEY_FAMILIES = ("gemma4",)  # nor of keys that are values too
UNQUANTISED = ("mlp.router.weight", SHARED_GATE)


def quantization_settings() -> dict[str, Any]:
    """What a config.json with such weights says beside everything else."""
    return {
        QUANTIZATION: {
            "quant_method": METHOD,
            "fmt": FORMAT,
            "weight_block_size": [BLOCK, BLOCK],
            "activation_scheme": "dynamic",
        }
    }


def quantised(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """HF name -> shape of its scales, of every weight that is quantised."""
    return {
        source.name: (blocks(source.shape[0]), blocks(source.shape[1]))
        for rule in _linears(config)
        for source in rule.sources
    }


def blocks(size: int) -> int:
    """Blocks of so many rows or columns; the last may be smaller."""
    return -(-size // BLOCK)


def check_servable(config: ModelConfig, tp: int) -> None:
    """Whether a server of this tensor-parallel size can hold the weights in blocks. Raises UserError.

    SGLang 0.5.21 wants blocks that no rank's share and no fused tensor cuts (Fp8LinearMethod.validate_block_quant_shapes).
    """
    if config.family in UNSCALED_FAMILIES:
        raise UserError(
            f"`rollout.quantization`: SGLang drops the scales of FP8 blocks of the family {config.family} as it loads them. Set "
            "it to null."
        )
    if config.family in STACKED_FAMILIES:
        raise UserError(
            f"`rollout.quantization`: SGLang has no FP8 for the experts of the family {config.family}. Set it to null."
        )
    if config.family in LINEAR_FAMILIES:
        raise UserError(
            f"`rollout.quantization`: which linears of Gated DeltaNet, as the family {config.family} has it, SGLang holds in FP8 "
            "is not known here. Set it to null."
        )
    if config.family in KEY_FAMILIES:
        raise UserError(
            f"`rollout.quantization`: what SGLang makes in FP8 of keys that are values too, as the family {config.family} has "
            "them, is not known here. Set it to null."
        )
    for rule in _linears(config):
        for source in rule.sources:
            rows, columns = source.shape
            cut_rows, cut_columns = tp if rule.cut == "rows" else 1, tp if rule.cut == "columns" else 1
            is_alone = len(rule.sources) == 1 and not source.pieces and cut_rows == 1
            is_cut = any(piece // cut_rows % BLOCK for piece in source.blocks)
            if (not is_alone and is_cut) or (cut_columns > 1 and columns // cut_columns % BLOCK):
                raise UserError(
                    f"`rollout.quantization`: {source.name} of {rows} x {columns} cannot be held in blocks of {BLOCK} x {BLOCK} "
                    f"by servers of rollout.tp {tp}: each rank's part has to be whole blocks. Lower rollout.tp, or set "
                    "rollout.quantization to null."
                )


def _linears(config: ModelConfig) -> Iterator[Rule]:
    for rule in rules(config, "transformer_engine"):  # which keeps whole what engines keep whole
        is_linear = (
            rule.megatron.startswith("decoder.layers.") and len(rule.sources[0].shape) == 2 and not rule.is_buffer
        )
        if is_linear and not rule.megatron.endswith(UNQUANTISED):
            yield rule
