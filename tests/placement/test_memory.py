"""Memory of a role, term by term, by numbers computed by hand from what the engine keeps; and against the engine itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.core.layout import Layout
from megarl.core.platform import get_platform
from megarl.core.types import MiniBatches
from megarl.models.config import Mla, Moe
from megarl.models.tower_size import TowerShape
from megarl.models.vision import Vision
from megarl.placement.activations import Counting
from megarl.placement.cluster import make_cluster
from megarl.placement.devices import DEVICES, Kernels
from megarl.placement.memory import Role, RoleBytes, Shown, role_bytes
from megarl.placement.sizes import adapter_sizes, model_sizes, routed_adapter_sizes
from megarl.placement.space import Space, one_layout
from megarl.placement.tables import first_layers, held_bytes, role_table
from megarl.placement.weight_sync import sync_seconds
from megarl.recipe.roles import Lora
from tests.placement.memory_cases import Case, measure, predict
from tests.placement.samples import QWEN_7B, QWEN_30B_A3B, workload

TOKENS = 8192
ACTOR, FROZEN = Role(trained=True, head=True), Role(trained=False, head=True)
TORCH = Kernels(fused=False)
PLAIN = replace(QWEN_7B, qk_norm=False)
EXPERTS = ("experts.linear_fc1", "experts.linear_fc2")
# Attention of a token in elements: queries, keys, values, output; beside them a log-sum in float32 for each head.
HEADS = 28 * 128
GROUPED = 2 * HEADS + 2 * 4 * 128


def held(role: Role = ACTOR, recompute: str = "none", kernels: Kernels | None = None, **sizes: int) -> RoleBytes:
    layout = Layout(**({"sequence_parallel": sizes.get("tp", 1) > 1} | sizes))  # type: ignore[arg-type]
    choice = one_layout(layout, TOKENS, recompute)  # type: ignore[arg-type]
    return role_bytes(PLAIN, choice, 2, role, kernels or Kernels())


def test_logits_are_held_once_with_a_few_chunks_in_float32() -> None:
    logits = held(tp=4, world_size=4).logits[0]
    columns = 152064 // 4
    # bfloat16, overwritten by their gradient. Beside them two chunks of float32, or, more, the gradients of output and matrix.
    chunk = 16 * 2**20 // columns * columns * 4
    gradients = TOKENS * 3584 * 2 + columns * 3584 * 2
    assert gradients > 2 * chunk
    assert logits == TOKENS * columns * 2 + gradients
    # Nothing near the ten bytes of a copy in float32 and its gradient.
    assert logits / (TOKENS * columns) < 3.3


def test_a_dense_layer_keeps_what_fused_kernels_save() -> None:
    counting = Counting(PLAIN, one_layout(Layout(), TOKENS), 2, Kernels(), TOKENS)
    # Inputs and outputs of two norms with a reciprocal each; the gate's input and output; attention.
    by_hand = 2 * (2 * 3584 * 2 + 4) + 3 * 18944 * 2 + GROUPED * 2 + 28 * 4
    assert counting.dense.kept[0] == TOKENS * by_hand
    # Both halves' gradients while the gate's input and the second linear's are still there; and the residual stream's.
    assert counting.dense.extra[0] == TOKENS * (2 * 18944 + 3584) * 2


def test_torch_keeps_the_steps_between() -> None:
    counting = Counting(PLAIN, one_layout(Layout(), TOKENS), 2, TORCH, TOKENS)
    norm = 2 * 3584 * 2 + 4  # as fused ones
    attention = 2 * GROUPED + 28 * 4 + 2 * HEADS + 4 * 128 * 2  # sequences put together; cosines and sines
    assert counting.dense.kept[0] == TOKENS * (2 * norm + 5 * 18944 * 2 + attention)


def test_layers_that_transformer_engine_does_not_make_are_torchs_in_plans() -> None:
    # As models/layer_spec.uses_transformer_engine has it: float32, and a window under context parallel.
    choice = one_layout(Layout(cp=2, world_size=2), TOKENS), one_layout(Layout(world_size=2), TOKENS)
    sliding = replace(PLAIN, window=1024, local_layers=frozenset(range(PLAIN.num_layers)))
    assert role_bytes(sliding, choice[0], 2, ACTOR) == role_bytes(sliding, choice[0], 2, ACTOR, TORCH)
    for config, cut, each in (sliding, choice[1], 2), (PLAIN, choice[0], 2):
        fused, torch = (role_bytes(config, cut, each, ACTOR, kernels).working[0] for kernels in (Kernels(), TORCH))
        assert fused < 0.9 * torch
    assert role_bytes(PLAIN, choice[1], 4, ACTOR) == role_bytes(PLAIN, choice[1], 4, ACTOR, TORCH)


def test_recompute_keeps_the_layers_inputs_and_one_layer() -> None:
    whole, full = held(tp=4, world_size=4), held(recompute="full", tp=4, world_size=4)
    hidden = TOKENS * 3584 * 2 / 4
    norm = TOKENS * (2 * 3584 * 2 + 4) / 4
    # 28 inputs, the last output, the gathered tokens, the last norm: the fullest moment is that of the logits.
    assert full.activations[0] == 29 * hidden + 4 * hidden + norm
    assert full.activations[0] < whole.activations[0] / 15
    # A core that is recomputed keeps its arguments, values inside of the linear's whole output, in the place of a log-sum.
    selective = held(recompute="selective", tp=4, world_size=4)
    more = TOKENS * 28 * ((HEADS + 4 * 128) * 2 - 28 * 4) / 4
    assert selective.activations[0] - whole.activations[0] == pytest.approx(more)


def test_recompute_of_some_layers_is_between_none_and_all() -> None:
    def working(layers: int | None, pp: int = 1) -> float:
        layout = Layout(tp=4, pp=pp, world_size=4 * pp, sequence_parallel=True)
        return float(role_bytes(PLAIN, one_layout(layout, TOKENS, "full", layers), 2, ACTOR, Kernels()).activations[0])

    none, full = held(tp=4, world_size=4).activations[0], held(recompute="full", tp=4, world_size=4).activations[0]
    hidden = TOKENS * 3584 * 2 / 4
    assert working(28) == working(100) == working(None) == full
    # Each recomputed layer keeps its input; as many less keep all. One hidden state more, of the recomputed ones' input.
    each = (none - full + hidden) / 28
    for layers in (1, 7, 20):
        assert working(layers) == pytest.approx(none + hidden - layers * each)
    # The number is of each pipeline rank's layers: 14, of two micro-batches at a time.
    assert working(14, pp=2) == working(None, pp=2)
    assert working(1, pp=2) - working(3, pp=2) == pytest.approx(2 * (working(1) - working(3)))


def test_what_sequence_and_context_parallel_cut() -> None:
    cut, whole = (held(tp=2, world_size=2, sequence_parallel=on) for on in (True, False))
    norms = 28 * 2 * (2 * 3584 * 2 + 4) + (2 * 3584 * 2 + 4)
    # Without it norms and residuals are whole on both ranks, and nothing has to be gathered.
    assert whole.activations[0] - cut.activations[0] == TOKENS * (norms / 2 - 3584 * 2)
    half = held(cp=2, world_size=2)
    assert half.activations[0] == pytest.approx(held().activations[0] / 2)


def test_gradients_of_adapters_alone() -> None:
    lora = Lora(rank=8, targets=("linear_qkv", "linear_fc2"))
    role = replace(ACTOR, lora=lora)
    adapted = held(role, tp=2, world_size=2)
    # Of linear_qkv A is whole and B cut, of linear_fc2 A is cut and B whole.
    qkv, fc2 = 8 * (3584 + (28 + 8) * 128 / 2), 8 * (18944 / 2 + 3584)
    own = 28 * (qkv + fc2)
    one, none = np.array([28.0]), np.array([0.0])
    assert adapter_sizes(PLAIN, lora, np.array([2]), one, none)[0] == own
    assert adapted.gradients[0] == own * 4 and adapted.optimizer[0] == own * 12
    assert adapted.weights[0] == model_sizes(PLAIN).total / 2 * 2 + own * 2
    # Frozen linears keep no input; adapters keep what is between their factors.
    counting = Counting(PLAIN, one_layout(Layout(), TOKENS), 2, Kernels(), TOKENS, lora)
    by_hand = (2 * 3584 * 2 + 4) + (3584 * 2 + 4) + 3 * 18944 * 2 + GROUPED * 2 + 28 * 4 + 2 * 8 * 2
    assert counting.dense.kept[0] == TOKENS * by_hand


def test_adapters_of_routed_experts_are_shared_out_as_experts_are() -> None:
    lora, layers = Lora(rank=8, targets=EXPERTS), np.array([48.0])
    # Of 128 experts each rank has 16: of fc1 A is whole and B cut, of fc2 A is cut and B whole.
    own = 48 * 16 * 8 * ((2048 + 2 * 768 / 2) + (768 / 2 + 2048))
    assert routed_adapter_sizes(QWEN_30B_A3B, lora, np.array([8]), np.array([2]), layers)[0] == own
    assert adapter_sizes(QWEN_30B_A3B, lora, np.array([2]), layers, layers)[0] == 0
    one = Lora(rank=8, targets=EXPERTS[1:])
    assert routed_adapter_sizes(QWEN_30B_A3B, one, 1, 1, layers)[0] == 48 * 128 * 8 * (768 + 2048)
    assert routed_adapter_sizes(PLAIN, lora, 1, 1, layers)[0] == 0
    layout = Layout(tp=2, ep=8, etp=2, sequence_parallel=True, world_size=32)
    held = role_bytes(QWEN_30B_A3B, one_layout(layout, TOKENS), 2, replace(ACTOR, lora=lora))
    assert held.gradients[0] == own * 4 and held.optimizer[0] == own * 12 / 2  # two ranks hold the same experts


def test_the_reference_without_adapters_shares_the_base() -> None:
    shared, own = held(replace(FROZEN, shares=True)), held(FROZEN)
    assert shared.state[0] == 0 and shared.working[0] == own.working[0] > 0


def test_a_plan_under_lora_counts_adapters_and_one_base() -> None:
    cluster, choice = make_cluster("H100", 1), one_layout(Layout(world_size=8, tp=2, sequence_parallel=True), TOKENS)
    whole = workload()
    adapted = replace(whole, lora=Lora(rank=8))
    actor, reference = (held_bytes(role, choice, adapted, cluster) for role in ("actor", "reference"))
    before = held_bytes("actor", choice, whole, cluster)
    assert reference.state[0] == 0 < held_bytes("reference", choice, whole, cluster).state[0]
    assert actor.gradients[0] < before.gradients[0] / 500 and actor.optimizer[0] < before.optimizer[0] / 500
    assert before.weights[0] < actor.weights[0] < before.weights[0] * 1.01


def test_a_layer_of_experts_keeps_permuted_tokens_for_each_choice() -> None:
    moe = Moe(num_experts=64, top_k=8, ffn_hidden_size=512, shared_ffn_hidden_size=256)
    config = replace(PLAIN, moe=moe, moe_layers=frozenset(range(28)))
    choice = one_layout(Layout(tp=2, sequence_parallel=True, world_size=2), TOKENS)
    counting = Counting(config, choice, 2, Kernels(), TOKENS)
    dense = counting.dense.kept[0] - TOKENS * 3 * 18944 * 2 / 2
    # Of half the tokens: permuted inputs, gates and outputs of 8 experts; scores, probabilities, maps; and of all the shared.
    routed = 8 * (3584 + 3 * 512) * 2 + 64 * (2 * 4 + 2 * 4) + 8 * (2 * 4 + 2 * 8)
    assert counting.experts.kept[0] == pytest.approx(dense + TOKENS * (routed / 2 + 3 * 256 / 2 * 2))


def test_latent_attention_keeps_both_latents_and_whole_heads() -> None:
    config = replace(PLAIN, mla=Mla(1536, 512, 128, 64, 128), num_kv_heads=28, head_dim=192)
    counting = Counting(config, one_layout(Layout(), TOKENS), 2, Kernels(), TOKENS)
    rest = counting.dense.kept[0] / TOKENS - 2 * (2 * 3584 * 2 + 4) - 3 * 18944 * 2
    latents = 2 * 1536 * 2 + 4 + 2 * 512 * 2 + 4 + 64 * 2
    assert rest == pytest.approx(latents + 28 * (2 * 192 + 2 * 128) * 2 + 28 * 4)


def test_a_tied_matrix_waits_for_the_embeddings_gradient() -> None:
    """Both and their sum, where an own matrix has one at a time."""
    few = replace(PLAIN, vocab_size=64 * 1024)
    choice = one_layout(Layout(), 64, "full")  # the matrix counts more than the tokens
    tied, own = (role_bytes(replace(few, tied_embeddings=it), choice, 2, ACTOR) for it in (True, False))
    assert tied.working[0] - own.working[0] == pytest.approx(2 * 64 * 1024 * 3584 * 2, rel=0.1)


def test_every_choice_is_counted_as_it_is_alone() -> None:
    layouts = [Layout(world_size=8, tp=2, pp=2), Layout(world_size=8, pp=4), Layout(world_size=8, cp=2)]
    alone = [one_layout(each, TOKENS, "full") for each in layouts]
    both = replace(alone[0], **{name: np.concatenate([getattr(a, name) for a in alone]) for name in vars(alone[0])})
    together = role_bytes(QWEN_7B, both, 2, ACTOR)
    for row, each in enumerate(alone):
        mine = role_bytes(QWEN_7B, each, 2, ACTOR)
        assert together.working[row] == mine.working[0] and together.state[row] == mine.state[0]


def test_an_actor_that_is_asked_for_log_probs_holds_what_they_take_where_its_layers_keep_little() -> None:
    cluster = make_cluster("H100", 1)

    def working(*, scores: MiniBatches | None, **more: object) -> float:
        work = workload(QWEN_7B, roles=("actor", "rollout", "reference"), scores=scores, **more)
        choice = one_layout(Layout(world_size=8), 16384, "full")
        return float(held_bytes("actor", choice, work, cluster).working[0])

    frozen = float(role_bytes(QWEN_7B, one_layout(Layout(world_size=8), 16384), 2, FROZEN).working[0])
    assert working(scores="all") == working(scores="later") >= frozen
    assert working(scores="all", lora=Lora(rank=8)) == working(scores=None, lora=Lora(rank=8)) == frozen


def test_an_actor_holds_its_teachers_likeliest_tokens_of_a_whole_mini_batch() -> None:
    cluster, choice = make_cluster("H100", 1), one_layout(Layout(world_size=8, tp=2, cp=2), TOKENS)

    def working(role: str, k: int) -> float:
        work = workload(roles=("actor", "rollout", "teacher"), teacher_top=k)
        return float(held_bytes(role, choice, work, cluster).working[0])

    # 1,024 samples in 8 mini-batches, over 2 data-parallel ranks, each cut in two; 64 ids and 65 log-probs a token, 516 bytes.
    tokens = 1024 * (512 + workload().responses.mean) / 8 / 2 / 2
    assert working("actor", 64) - working("actor", 0) == pytest.approx(tokens * 516)
    assert working("teacher", 64) == working("teacher", 0)


def test_the_table_of_devices_cuts_as_the_engine_does() -> None:
    for name, device in (("cpu", "cpu"), ("cuda", "H100")):
        platform = get_platform(name)  # type: ignore[arg-type]
        kernels = DEVICES[device].kernels
        assert kernels.chunk_elements == platform.chunk_elements
        assert kernels.sums_in_copies == (platform.backend == "gloo")
        assert DEVICES[device].pads_servers == platform.pads_weights
    assert not DEVICES["cpu"].kernels.fused and not get_platform("cpu").has_transformer_engine


MEASURED = (
    Case("dense", tokens=128),
    Case("dense, many words", dtype="bfloat16", tokens=128),
    Case("dense, many words", tokens=128, use="score"),
    Case("tied", dtype="bfloat16", recompute="full", tokens=128),
    Case("dense, many words", dtype="bfloat16", recompute="full", tokens=512, use="both"),
    Case("dense, many words", dtype="bfloat16", tokens=512, use="both"),
    Case("tied", tokens=32),
    Case("dense", dtype="bfloat16", recompute="full", recompute_num_layers=1, tokens=256),
    Case("experts", recompute="full", recompute_num_layers=3, tokens=128),
    Case("experts", tokens=128),
    Case("experts, one gated", tokens=128),
    Case("experts, one gated", dtype="bfloat16", tokens=128),
    Case("latent", dtype="bfloat16", tokens=128),
    Case("neighbours rotated", dtype="bfloat16", tokens=128),
    Case("neighbours rotated", tokens=128),
    Case("partly rotated", dtype="bfloat16", tokens=128),
    Case("norms behind", tokens=128),
    Case("norms behind", dtype="bfloat16", tokens=512),
    Case("no positions, norms behind", tokens=512),
    Case("whole norms, experts", dtype="bfloat16", tokens=256),
    Case("bias behind attention", tokens=256),
    Case("bias behind attention", dtype="bfloat16", tokens=512),
    Case("whole norms, partly rotated", tokens=256),
    Case("whole norms, partly rotated", dtype="bfloat16", tokens=512),
    Case("learned activation", tokens=256),
    Case("learned activation", dtype="bfloat16", tokens=512),
    Case("neighbours rotated, no norms behind", dtype="bfloat16", tokens=256),
    Case("biased softmax", tokens=256),
    Case("biased softmax", dtype="bfloat16", tokens=256),
    Case("norms behind rotation", tokens=256),
    Case("norms behind rotation", dtype="bfloat16", tokens=512),
    Case("norms behind rotation, experts", dtype="bfloat16", tokens=256),
    Case("sinks", dtype="bfloat16", tokens=256),
    Case("sinks", tokens=256),
    Case("linear attention", tokens=256),
    Case("linear attention", dtype="bfloat16", recompute="selective", tokens=256),
    Case("linear attention, experts", dtype="bfloat16", tokens=256),
    Case("dense, growing queries", tokens=128),
    Case("dense, growing queries", dtype="bfloat16", tokens=256),
    Case("dense, qk norm", lora=Lora(rank=8), tokens=256),
    Case("experts", lora=Lora(rank=8, targets=("linear_qkv", *EXPERTS)), tokens=256),
    Case("dense", head=False, recompute="selective", tokens=256),
)


def test_predictions_hold_against_the_engine(tmp_path: Path) -> None:
    """More layouts, of several ranks, are measured by bench/memory_predicted.py."""
    from bench.support.training import one_rank

    with one_rank() as rank:
        for case in MEASURED:
            found, said = measure(rank, case, tmp_path), predict(case, tmp_path)
            assert said.state[0] == pytest.approx(found.state, rel=0.01), case
            assert said.state[0] + said.working[0] == pytest.approx(found.peak, rel=0.05), case
            assert said.working[0] == pytest.approx(found.peak - found.state, rel=0.1), case


def test_a_vision_tower_is_whole_on_every_tensor_parallel_rank_and_frozen() -> None:
    """Its weights alone: neither gradients nor moments."""
    seeing = replace(PLAIN, vision=Vision(1, 2, 3, 28, 3136, 12845056, (16, 24, 24), tower_elements=10**9))
    for layout in (Layout(), Layout(tp=2, world_size=2)):
        choice = one_layout(layout, TOKENS)
        for role in (ACTOR, FROZEN):
            text, whole = (role_bytes(config, choice, 2, role) for config in (PLAIN, seeing))
            assert whole.weights[0] - text.weights[0] == 2 * 10**9
            for name in vars(text).keys() - {"weights"}:
                assert getattr(whole, name)[0] == getattr(text, name)[0], name


LEARNS = TowerShape(4, 64, 128, 4, 4, 1536, 3584, 1, 2, wide_norms=False)
SEEING = replace(
    PLAIN, vision=Vision(1, 2, 3, 32, 3136, 12845056, (16, 24, 24), tower_elements=10**9, deepstack=1, shape=LEARNS)
)


def test_a_vision_tower_that_learns_has_gradients_and_moments_and_what_is_asked_of_images() -> None:
    frozen, learns = ACTOR, replace(ACTOR, shown=Shown(squares=1000, images=4, samples=32))
    for layout, ranks in ((Layout(), 1), (Layout(tp=2, world_size=4), 2)):
        choice = one_layout(layout, TOKENS)
        before, after = (role_bytes(SEEING, choice, 2, role) for role in (frozen, learns))
        assert after.weights[0] == before.weights[0]
        assert after.gradients[0] - before.gradients[0] == 4 * 10**9
        assert after.optimizer[0] - before.optimizer[0] == 12 * 10**9 / ranks  # over data parallel, and not over tensor
        # Of four images in two levels: features in bfloat16, and their gradients in float32.
        assert after.working[0] - before.working[0] == 4 * 1000 * 2 * 3584 * (2 + 4)


def test_the_towers_backward_pass_is_of_one_image_when_layers_keep_nothing_any_more() -> None:
    large = replace(ACTOR, shown=Shown(squares=10**6, images=1, samples=1))
    for recompute in ("none", "full"):
        found = role_bytes(SEEING, one_layout(Layout(), TOKENS, recompute), 2, large)  # type: ignore[arg-type]
        one = LEARNS.backward_bytes(10**6, 2, again=recompute == "full")
        assert found.working[0] == one + 10**6 * 2 * 3584 * 4 + 2**29  # as many features as are kept
    assert LEARNS.backward_bytes(1, 2, again=True) < LEARNS.backward_bytes(1, 2, again=False)


def test_only_the_stage_with_the_embedding_has_a_tower() -> None:
    """Of two stages the first is the fuller one for it, and of four as many ranks share its moments."""
    learns = replace(ACTOR, shown=Shown(squares=1000, images=4, samples=32))
    for pp in (1, 2):
        choice = one_layout(Layout(pp=pp, world_size=pp), TOKENS)
        with_it, text = role_bytes(SEEING, choice, 2, learns), role_bytes(PLAIN, choice, 2, ACTOR)
        assert with_it.state[0] - text.state[0] >= (2 + 4 + 12) * 10**9 * 0.5


def test_a_plan_counts_the_actors_tower_alone_where_that_learns() -> None:
    cluster, choice = make_cluster("H100", 1), one_layout(Layout(world_size=8), TOKENS)
    roles = ("actor", "rollout", "reference", "critic")
    works = [workload(SEEING, roles=roles, towers=frozenset(each), largest_image=256) for each in ((), ("actor",))]
    for role in ("actor", "reference", "critic"):
        before, after = (held_bytes(role, choice, work, cluster) for work in works)
        assert (after.gradients[0] > before.gradients[0]) == (role == "actor")
    assert works[0].sent_tower == 0 and works[1].sent_tower == 2 * 10**9
    without, with_it = (sync_seconds(SEEING, work, cluster)[0] for work in works)
    assert with_it > without


def test_layouts_that_a_tower_cannot_learn_at_are_not_searched() -> None:
    """Features are added behind more layers than the first stage of four has."""
    deep = replace(SEEING, num_layers=8, vision=replace(SEEING.vision, deepstack=3, tower_elements=10**6))  # type: ignore[type-var]
    cluster = make_cluster("H100", 1)
    for towers, most in ((frozenset(), 4), (frozenset({"actor"}), 2)):
        work = workload(deep, roles=("actor", "rollout"), towers=towers, largest_image=256)
        space = Space(pp=(1, 2, 4), vpp=(1,), tp=(1,), cp=(1,), rest=(False,))
        found = role_table("actor", work, cluster, space, (8,)).layouts
        chunk = first_layers(found, deep)
        assert len(found) and (not towers or np.all((found.pp == 1) | (chunk >= 3))), most
