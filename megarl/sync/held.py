"""What each rank of an SGLang server holds of HF's tensors: fused, cut, repeated and padded. Pure, without torch.

Checked on SGLang 0.5.21, family by family, against what its servers say that they hold (tests/sync/test_hashes.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.models.config import ModelConfig
from megarl.models.layout_check import BY_TRANSFORMERS
from megarl.models.multimodal import TOWER
from megarl.models.rules import Rule, Source, rules
from megarl.sync.held_piece import MLP_PADDING, Piece, share, up, vocabulary_size
from megarl.sync.held_tower import TowerServer, engine_name, is_of_tower

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
ROUTER = "mlp.router.weight"
# Of which the engine has other names; and what it has in the model's dtype, whatever that is elsewhere (models/ernie4.py,
# layers/activation.py).
ROUTERS = {"router.layer.weight": "gate.weight", "gate.wg.weight": "gate.weight"}
NARROW = ("moe_statics.e_score_correction_bias", "act_fn.beta", "act_fn.eps")
WIDE_ROUTERS = ("glm4_moe", "glm4_moe_lite", "minimax_m2")  # families
CUT_NORMS = ("minimax_m2",)  # families whose norms over all heads each rank has its part of
# Of a layer's experts what stands beside the layer's MLP (models/gemma4_causal.py).
BESIDE, OF_EXPERTS = "gemma4", "router.per_expert_scale"
# What its servers hold beside: ones in the place of weights of norms, and a copy of the router's scale, which they make; and
# servers of models that see, which frequencies turn by which axis.
MADE = ("self_attn.v_norm.weight", "router.norm.weight", "router.root_size", "rotary_emb.axis_map")
WHOLE_EMBEDDINGS = ("gemma3", "gemma4")  # families
NORM, MIXED = "layernorm.weight", "self_attention.linear_qkv.weight"
SHARED, ROUTED = ".shared_experts.", ".experts."
KEYS_VALUES = (".k_proj.", ".v_proj.")
QKV = ("q_proj", "k_proj", "v_proj")
# Ends of module names: HF's -> the engine's. Those with the same target stand in it in the order of the rules.
HEADS = {f"self_attn.{each}": "self_attn.qkv_proj" for each in QKV}
LATENT = dict.fromkeys(("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"), "self_attn.fused_qkv_a_proj_with_mqa")
GATED = {
    f"{mlp}.{each}": f"{mlp}.gate_up_proj"
    for mlp in ("mlp", "mlp.shared_experts", "mlp.shared_expert", "mlp.shared_mlp")
    for each in ("gate_proj", "up_proj")
}
EXPERTS = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "w13_weight"),
    **dict.fromkeys(("down_proj", "w2"), "w2_weight"),
}
# Of all experts, in one tensor.
ROW_STACKED = {"input_linear": "experts.w13_weight", "output_linear": "experts.w2_weight"}
STACKED = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_weight_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_weight_bias",
}


@dataclass(frozen=True)
class Held:
    """A tensor of one rank: pieces end to end. wide: float32 whatever the model is."""

    rank: int
    name: str
    pieces: tuple[Piece, ...]
    wide: bool = False


def held_by(config: ModelConfig, tp: int, *, pads: bool) -> list[Held]:
    """Every tensor of every rank of a server of this tensor-parallel size, in which something of the model lies.

    pads: sizes that its ranks do not share evenly are filled up with zeros, as SGLang's CPU engine does it
    (configs/update_config.py); off: what is fewer than ranks is repeated.
    """
    found = _tower(config, tp, pads)
    for rule in rules(config, "transformer_engine"):  # which keeps whole what engines keep whole
        if is_of_tower(rule.sources[0].name):
            continue  # above
        server = _Server(config.of_layer(rule.layer), tp, pads)
        for source in _sources(server.config, rule):
            if source.slot is not None and source.is_turned and source.slot.first:
                continue  # in the same rows as the first, which stand for all
            name = _engine_name(config, source.name, rule)
            for rank in range(tp):
                pieces, _ = found.setdefault((rank, name), ([], _is_wide(config, rule)))
                pieces += server.pieces(rule, source, rank)
    return [Held(rank, name, tuple(pieces), wide) for (rank, name), (pieces, wide) in found.items()]


def _tower(config: ModelConfig, tp: int, pads: bool) -> dict[tuple[int, str], tuple[list[Piece], bool]]:
    """Of a vision tower that learns; a frozen one is the server's own."""
    found: dict[tuple[int, str], tuple[list[Piece], bool]] = {}
    if config.vision is None:
        return found
    server = TowerServer(tp, config.vision.tower_heads, pads)
    for name, shape in config.vision.tower:
        for rank in range(tp):
            pieces, _ = found.setdefault((rank, engine_name(TOWER + name)), ([], False))
            pieces += server.pieces(TOWER + name, shape, rank)
    return found


def _sources(config: ModelConfig, rule: Rule) -> Iterator[Source]:
    """Those of a rule. Keys that are values too stand in both places (models/gemma4_causal.py)."""
    yield from rule.sources
    if config.keys_as_values and rule.megatron.endswith(MIXED):
        yield rule.sources[-1]


def _is_wide(config: ModelConfig, rule: Rule) -> bool:
    """Routers of GLM-4.5, GLM-4.7-Flash and MiniMax-M2 (models/glm4_moe.py: Glm4MoeGate, glm4_moe_lite.py: Glm4MoeLiteGate,
    minimax_m2.py: MiniMaxM2MoE), biases of experts (layers/quantization/unquant.py), and those of the choice of experts."""
    if rule.is_buffer:
        return not rule.sources[0].name.endswith(NARROW)
    if rule.expert is not None and rule.megatron.endswith(".bias"):
        return True
    return config.family in WIDE_ROUTERS and rule.megatron.endswith(ROUTER)


def _engine_name(config: ModelConfig, name: str, rule: Rule) -> str:
    prefix, _, rest = name.partition(".layers.")
    if not rest:
        return name
    number, _, path = rest.partition(".")
    experts, _, linear = path.rpartition(".")
    if rule.expert is not None and linear in STACKED:
        path = f"{'' if config.family != BESIDE else 'moe.'}{experts}.{STACKED[linear]}"
    elif rule.expert is not None and experts.endswith(tuple(ROW_STACKED)):
        mlp, _, linear = experts.rpartition(".")
        path = f"{mlp}.{ROW_STACKED[linear]}"
    elif path == OF_EXPERTS:
        path = path.replace("router.", "moe.")
    elif path.endswith(NARROW[0]):
        path = path.replace("moe_statics.", "gate.")
    elif renamed := next((each for each in ROUTERS if path.endswith(each)), None):
        path = path.replace(renamed, ROUTERS[renamed])
    elif rule.expert is not None:
        experts, _, linear = path.removesuffix(".weight").partition(f".experts.{rule.expert}.")
        path = f"{experts}.experts.{EXPERTS[linear]}"
    else:
        module, _, kind = path.rpartition(".")
        fused = dict(GATED) if config.halves == 2 else {}
        if config.mla is None:
            fused |= HEADS
        elif config.mla.q_rank is not None:
            fused |= LATENT
        if module and config.family not in BY_TRANSFORMERS:
            path = f"{fused.get(module, module)}.{kind}"
    return f"{prefix}.layers.{number}.{path}"


@dataclass(frozen=True)
class _Server:
    config: ModelConfig
    tp: int
    pads: bool

    def pieces(self, rule: Rule, source: Source, rank: int) -> Iterator[Piece]:
        """A rank's part of an HF tensor: one piece, or one of each tensor that is in it."""
        if source.slot is not None and source.is_turned:
            yield self._stacked(rule, source, rank)
            return
        rows, begins = source.shape[0], source.first_row
        # Gemma's embedding is one of torch's own, whole on every rank; so are norms over all heads (models/olmo2.py).
        torchs = source.name in VOCABULARY[:1] and self.config.family in WHOLE_EMBEDDINGS
        whole_norm = rule.megatron.endswith(NORM) and self.config.family not in CUT_NORMS
        if rule.cut == "whole" or torchs or whole_norm:
            yield Piece(source.name, 0, rows)
        elif rule.cut == "columns":
            start, stop, beside = self._share(rule, source.name, source.shape[1], rank)
            yield Piece(source.name, begins, begins + rows, (start, stop), beside=beside)
        else:
            names = [source.name.replace("qkv_proj", each) for each in QKV] if "qkv_proj" in source.name else []
            for index, size in enumerate(source.blocks):
                start, stop, below = self._share(rule, names[index] if names else source.name, size, rank)
                yield Piece(source.name, begins + start, begins + stop, below=below)
                begins += size

    def _stacked(self, rule: Rule, source: Source, rank: int) -> Piece:
        """A rank's part of what an expert has in a tensor of all: gate and up by turns, as HF has them."""
        rows = source.shape[0] * (source.slot.step if source.slot is not None else 1)
        if rule.cut == "rows":
            start, stop, below = self._share(rule, source.name, rows, rank)
            return Piece(source.name, start, stop, below=below, expert=rule.expert)
        if rule.cut == "columns":
            start, stop, beside = self._share(rule, source.name, source.shape[1], rank)
            return Piece(source.name, 0, rows, (start, stop), beside=beside, expert=rule.expert)
        mine = rows if rank == 0 else 0  # a bias of what the ranks' parts add up to
        return Piece(source.name, 0, mine, below=rows - mine, expert=rule.expert)

    def _share(self, rule: Rule, name: str, size: int, rank: int) -> tuple[int, int, int]:
        """[start, stop) of what is cut, and the zeros behind it."""
        keys = any(each in name for each in KEYS_VALUES)
        if keys and not self.pads and self.config.num_kv_heads < self.tp:
            repeats, each = self.tp // self.config.num_kv_heads, self.config.head_dim
            return rank // repeats * each, (rank // repeats + 1) * each, 0
        return share(size, self._padded(name, size), self.tp, rank)

    def _padded(self, name: str, size: int) -> int:
        """The whole size, with its padding."""
        tp, config = self.tp, self.config
        if name in VOCABULARY:
            return vocabulary_size(size, tp)
        if not self.pads:
            return size
        if ".self_attn." in name:
            # As many heads for each head of keys and values as before.
            return size // config.num_kv_heads * up(config.num_kv_heads, tp) if config.mla is None else size
        # Shared experts are as wide as so many of the others, each with its padding; and so are gate and up in one.
        each = config.moe.ffn_hidden_size if config.moe is not None and (SHARED in name or ROUTED in name) else size
        return size // each * up(each, MLP_PADDING * tp)
