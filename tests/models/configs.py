"""Random small models with every feature, and layouts that they can have, for the properties of the mapping."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from megarl.core.layout import Layout
from megarl.models.config import Mla, ModelConfig, Moe, Rope
from megarl.models.layout_check import layout_problems
from megarl.models.rules import expected_tensors

PLAIN = ModelConfig(
    family="any",
    architecture="any",
    num_layers=2,
    hidden_size=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=1,
    ffn_hidden_size=4,
    vocab_size=4,
    max_positions=64,
    rope=Rope(1e4),
    norm_eps=1e-6,
    tied_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
    eos_token_ids=(),
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts of up to 16 ranks, every axis among them."""
    tp, pp, ep, etp = (draw(st.sampled_from(sizes)) for sizes in ([1, 2, 3, 4], [1, 2], [1, 2], [1, 2]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    dense, experts = tp * pp, ep * etp * pp
    world = next(size for size in range(1, 97) if size % dense == 0 and size % experts == 0)
    return Layout(tp=tp, pp=pp, ep=ep, etp=etp, vpp=vpp, sequence_parallel=tp > 1, world_size=world)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelConfig, Layout]:
    """A model and a layout of it. Key-value heads may be fewer than the tensor-parallel ranks."""
    layout, small = draw(layouts()), st.integers(1, 3)
    tp = layout.tp
    kv_heads = draw(st.sampled_from([heads for heads in range(1, tp + 1) if tp % heads == 0] + [2 * tp]))
    heads = kv_heads * draw(small) * (tp if kv_heads < tp else 1)
    layers = layout.pp * layout.vpp * draw(st.integers(1, 2))
    config = replace(
        PLAIN,
        num_layers=layers,
        hidden_size=draw(st.integers(1, 5)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        # Ranks that cut through a group of heads have to cut it evenly.
        head_dim=draw(small) * (tp if kv_heads < tp else 1),
        ffn_hidden_size=tp * draw(small),
        vocab_size=draw(st.integers(1, 13)),
        tied_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        post_norms=draw(st.booleans()),
        family=draw(st.sampled_from(["any", "glm4", "phi3"])),
    )
    if draw(st.booleans()) or layout.ep * layout.etp > 1:
        config = _with_experts(draw, config, layout)
    if draw(st.booleans()):
        config = _with_latent_attention(draw, config, layout)
    assert layout_problems(config, layout) == []
    return config, layout


def _with_experts(draw: st.DrawFn, config: ModelConfig, layout: Layout) -> ModelConfig:
    moe = Moe(
        num_experts=layout.ep * draw(st.integers(1, 3)),
        top_k=1,
        ffn_hidden_size=layout.etp * draw(st.integers(1, 2)),
        shared_ffn_hidden_size=layout.tp * draw(st.integers(0, 2)),
        score_bias=draw(st.booleans()),
        shared_gate=draw(st.booleans()),
    )
    layers = draw(st.sets(st.integers(0, config.num_layers - 1), min_size=1))
    # Gemma's norms and experts are of different families.
    family = draw(st.sampled_from(["any", "mixtral"]))
    moe = replace(moe, shared_ffn_hidden_size=max(moe.shared_ffn_hidden_size, layout.tp * moe.shared_gate))
    return replace(config, moe=moe, moe_layers=frozenset(layers), family=family, post_norms=False)


def _with_latent_attention(draw: st.DrawFn, config: ModelConfig, layout: Layout) -> ModelConfig:
    nope, rope, v_dim, rank = (draw(st.integers(1, 3)) for _ in range(4))
    kv_rank = layout.tp * (rope + rank) - rope
    mla = Mla(draw(st.sampled_from([None, layout.tp * rank])), kv_rank, nope, rope, v_dim)
    heads = layout.tp * rank
    return replace(config, mla=mla, num_heads=heads, num_kv_heads=heads, head_dim=nope + rope, qk_norm=False)


def random_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Every HF tensor of a model, all of its values different."""
    found, start = {}, 0
    for name, shape in expected_tensors(config).items():
        count = torch.Size(shape).numel()
        found[name] = torch.arange(start, start + count, dtype=torch.float32).reshape(shape)
        start += count
    return found
