"""What a role may be beside a plain model: adapted, its own reference, at rest, with the rollout's routing."""

import dataclasses

import numpy as np
import pytest
import torch

from megarl.core.errors import MegarlError
from megarl.recipe.roles import Lora
from megarl.training.spec import RoleSpec
from tests.support.tiny import write_tiny_model
from tests.training.harness import VOCAB, assert_same, weights, written
from tests.training.samples import examples, shards

LENGTHS = [9, 17, 30, 12]


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A random mixture of experts."""
    return write_tiny_model(tmp_path_factory.mktemp("experts") / "model", "qwen3_moe", vocab_size=VOCAB)


def one_update(rank, role="actor", seed=0, routing=None):
    [shard], [columns] = shards([examples(LENGTHS, VOCAB, seed)], micro_batches=2)
    if routing is not None:
        shard = routed(shard, routing)
    return rank.update(role, shard, columns)


def routed(shard, choose):
    """The shard with a routing for each micro-batch, made by `choose(number of tokens)`."""
    [mini] = shard.mini_batches
    micros = [dataclasses.replace(micro, routing=choose(micro.num_tokens)) for micro in mini.micro_batches]
    return dataclasses.replace(shard, mini_batches=(dataclasses.replace(mini, micro_batches=tuple(micros)),))


def test_adapters_learn_and_the_model_without_them_is_the_reference(rank, spec, folder):
    rank.build("plain", RoleSpec(folder, "float32", spec.temperature))
    rank.build("actor", dataclasses.replace(spec, lora=Lora(rank=4, alpha=8, targets=("linear_qkv", "linear_fc1"))))
    rank.build("reference", RoleSpec(folder, "float32", base_of="actor"))
    [shard], _ = shards([examples(LENGTHS, VOCAB)])
    before = rank.logprobs("plain", shard)
    assert np.array_equal(rank.logprobs("actor", shard)[0][0], before[0][0])
    for seed in range(2):
        assert one_update(rank, seed=seed)["actor/grad_norm"] > 0
    assert np.abs(rank.logprobs("actor", shard)[0][0] - before[0][0]).max() > 1e-4
    assert np.array_equal(rank.logprobs("reference", shard)[0][0], before[0][0])
    changed = {
        name for name, tensor in weights(rank, "actor").items() if not torch.equal(tensor, weights(rank, "plain")[name])
    }
    assert {name.rsplit(".", 2)[1] for name in changed} <= {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert len(changed) == 5 * 3
    assert_same(written(rank, "actor"), weights(rank, "actor"))


def test_what_is_written_into_shared_memory_is_what_is_gathered(rank, tmp_path):
    """In bfloat16, with buffers that stay float32, tied embeddings, and parameters that are elsewhere between operations."""
    for family, overrides in {"deepseek_v3": {}, "qwen3": {"tie_word_embeddings": True}}.items():
        folder = write_tiny_model(tmp_path / family, family, num_hidden_layers=3, **overrides)
        rank.build(family, RoleSpec(folder, "bfloat16", offload=("params",)))
        assert_same(written(rank, family), weights(rank, family))
        dtypes = {tensor.dtype for tensor in weights(rank, family).values()}
        assert dtypes == ({torch.bfloat16, torch.float32} if family == "deepseek_v3" else {torch.bfloat16})


def test_a_reference_needs_the_role_that_it_is_the_base_of(rank, folder):
    with pytest.raises(MegarlError, match="hosts no role 'nobody'"):
        rank.build("reference", RoleSpec(folder, "float32", base_of="nobody"))


def test_a_role_that_rests_between_operations_computes_the_same(rank, spec):
    expected, found = [], []
    for offloaded, into in (((), expected), (("grads", "params", "optimizer"), found)):
        rank.build("actor", dataclasses.replace(spec, offload=offloaded))
        for seed in range(3):
            [shard], _ = shards([examples(LENGTHS, VOCAB, seed)])
            into.append((rank.logprobs("actor", shard)[0][0].tolist(), one_update(rank, seed=seed)))
        into.append({name: tensor.tolist() for name, tensor in weights(rank, "actor").items()})
        assert rank.engine("actor").sleep() == (0 if offloaded else rank.wake("actor"))
    assert found == expected


def test_a_sleeping_role_wakes_for_what_is_asked_of_it(rank, spec, tmp_path):
    rank.build("actor", spec)
    one_update(rank)
    freed = rank.sleep("actor")
    [shard], _ = shards([examples(LENGTHS, VOCAB)])
    scored = rank.logprobs("actor", shard)[0][0]
    assert 0 < rank.wake("actor") < freed, "the parameters were awake already"
    assert np.array_equal(rank.logprobs("actor", shard)[0][0], scored)
    rank.sleep("actor")
    rank.save("actor", tmp_path)
    assert any(tmp_path.iterdir())


def test_routing_that_the_router_would_choose_changes_nothing_and_another_does(rank, spec, experts, bounds):
    rank.build("actor", dataclasses.replace(spec, folder=experts, routing_replay=True))
    [shard], _ = shards([examples(LENGTHS, VOCAB)])
    free = rank.logprobs("actor", shard)[0][0]
    chosen = chosen_by(rank.engine("actor"), shard)
    replayed = rank.logprobs("actor", routed(shard, lambda _: chosen))[0][0]
    # The experts' outputs are summed in another order.
    np.testing.assert_allclose(replayed, free, atol=2 * bounds.split)
    other = (chosen + 1) % 8
    assert np.abs(rank.logprobs("actor", routed(shard, lambda _: other))[0][0] - free).max() > 1e-3
    unknown = np.full_like(chosen, -1)
    unrouted = rank.logprobs("actor", routed(shard, lambda _: unknown))[0][0]
    np.testing.assert_allclose(unrouted, free, atol=2 * bounds.split)
    # Nothing is left behind for batches that say nothing of their routing.
    assert np.array_equal(rank.logprobs("actor", shard)[0][0], free)


def chosen_by(engine, shard, top=3):
    """[T, layers x k] int16: what the routers choose by themselves, asked layer by layer; 0 in dense layers."""
    layers = engine._chunks[0].decoder.layers
    chosen, hooks = {}, []
    for index, layer in enumerate(layers):
        if hasattr(layer.mlp, "router"):

            def keep(_, __, output, index=index):
                chosen[index] = output[1]  # [T, experts] bool: the routing map

            hooks.append(layer.mlp.router.register_forward_hook(keep))
    engine.logprobs(shard)
    for hook in hooks:
        hook.remove()
    tokens = next(iter(chosen.values())).shape[0]
    table = np.zeros((tokens, len(layers), top), np.int16)
    for index, routing_map in chosen.items():
        table[:, index] = routing_map.nonzero()[:, 1].reshape(tokens, top).cpu().numpy()
    return table.reshape(tokens, -1)


@pytest.mark.parametrize(("recompute", "num_layers"), [("none", None), ("full", None), ("full", 2)])
def test_replayed_routing_is_that_of_backward_too(rank, spec, experts, recompute, num_layers, bounds):
    """Recomputed layers route again: to the experts of their own micro-batch, not of the last."""
    random = np.random.default_rng(3)
    tables = {}

    def choose(num_tokens):
        if num_tokens not in tables:
            rows = [[random.permutation(8)[:3] for _ in range(3)] for _ in range(num_tokens)]
            tables[num_tokens] = np.array(rows, np.int16).reshape(num_tokens, -1)
        return tables[num_tokens]

    random = np.random.default_rng(3)
    tables.clear()
    given = {"recompute": recompute, "recompute_num_layers": num_layers}
    rank.build("actor", dataclasses.replace(spec, folder=experts, routing_replay=True, **given))
    metrics = [one_update(rank, seed=seed, routing=choose) for seed in range(2)]
    trained = weights(rank, "actor")
    random = np.random.default_rng(3)
    tables.clear()
    rank.build("actor", dataclasses.replace(spec, folder=experts, routing_replay=True))
    assert metrics == [
        pytest.approx(one_update(rank, seed=seed, routing=choose), rel=bounds.split, abs=1e-9) for seed in range(2)
    ]
    assert (
        max((trained[name] - tensor).abs().max() for name, tensor in weights(rank, "actor").items()) < bounds.split / 10
    )


def test_the_balance_of_experts_enters_the_gradient_as_a_mean_over_tokens(rank, spec, experts, bounds):
    """However the samples are cut into micro-batches, Megatron's auxiliary loss keeps its order of magnitude."""
    norms = {}
    for coef in (0.0, 1.0):
        for micro_batches in (1, 4):
            rank.build("actor", dataclasses.replace(spec, folder=experts, aux_loss_coef=coef))
            [shard], [columns] = shards([examples(LENGTHS, VOCAB)], micro_batches=micro_batches)
            norms[coef, micro_batches] = rank.update("actor", shard, columns)["actor/grad_norm"]
    assert norms[0.0, 4] == pytest.approx(norms[0.0, 1], rel=bounds.loss)
    assert norms[1.0, 1] != pytest.approx(norms[0.0, 1], rel=1e-3)
    assert norms[1.0, 4] == pytest.approx(norms[1.0, 1], rel=0.5)


def test_models_of_other_depths_balance_their_experts_in_one_process(rank, spec, experts, tmp_path):
    """Megatron's table of auxiliary losses is the process's, and has a place for each layer of the first model there."""
    deeper = write_tiny_model(tmp_path / "deeper", "qwen3_moe", vocab_size=VOCAB, num_hidden_layers=4)
    for folder in (experts, deeper):
        rank.build("actor", dataclasses.replace(spec, folder=folder, aux_loss_coef=1.0))
        assert one_update(rank)["actor/grad_norm"] > 0


def test_frozen_routers_stay_as_they_are_and_the_rest_learns(rank, spec, experts):
    optimizer = spec.optimizer.model_copy(update={"freeze_router": True, "weight_decay": 0.1})
    rank.build("actor", dataclasses.replace(spec, folder=experts, optimizer=optimizer))
    before = weights(rank, "actor")
    one_update(rank)
    after = weights(rank, "actor")
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert same == [name for name in before if name.endswith("mlp.gate.weight")] != []


def test_a_reference_is_refreshed_from_the_actor_bit_for_bit(rank, spec, folder):
    rank.build("actor", dataclasses.replace(spec, offload=("params",)))
    rank.build("reference", RoleSpec(folder, "float32", spec.temperature, offload=("params",)))
    one_update(rank)
    [shard], _ = shards([examples(LENGTHS, VOCAB)])
    assert not np.array_equal(rank.logprobs("reference", shard)[0][0], rank.logprobs("actor", shard)[0][0])
    rank.copy_weights("actor", "reference")
    assert np.array_equal(rank.logprobs("reference", shard)[0][0], rank.logprobs("actor", shard)[0][0])
    one_update(rank)
    assert not np.array_equal(rank.logprobs("reference", shard)[0][0], rank.logprobs("actor", shard)[0][0])
    with pytest.raises(MegarlError, match="into frozen roles only"):
        rank.copy_weights("reference", "actor")
