import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.core.errors import MegarlError, UserError
from megarl.core.types import MicroBatch, MiniBatch, Shard
from megarl.recipe.algorithm import Algorithm
from megarl.recipe.roles import Optimizer
from megarl.training.gradient_watch import FEWEST, MOST_SKIPPED
from megarl.training.spec import PolicyObjective, RoleSpec, SftObjective
from tests.training import torch_loop
from tests.training.harness import VOCAB, weights
from tests.training.samples import examples, shards

POLICY = PolicyObjective(Algorithm())


def test_logprobs_equal_transformers_over_two_thousand_tokens(rank, spec, folder, bounds):
    rank.build("actor", spec)
    made = examples([100, 7, 300, 2, 511, 64, 1024], VOCAB)
    [shard], _ = shards([made])
    [[column]] = rank.logprobs("actor", shard)
    with torch.no_grad():
        model = torch_loop.load(folder)
        expected = torch.cat([torch_loop.scores(model, example, torch_loop.TEMPERATURE)[0] for example in made])
    assert column.dtype == np.float32
    assert len(column) >= 2000
    assert np.abs(column - expected.numpy()).max() < bounds.logprob


def test_entropy_equals_transformers(rank, spec, folder, bounds):
    rank.build("actor", spec)
    made = examples([20, 30], VOCAB)
    [shard], _ = shards([made])
    scores = rank.engine("actor").scores(shard, with_entropy=True)
    with torch.no_grad():
        model = torch_loop.load(folder)
        expected = torch.cat([torch_loop.scores(model, example, torch_loop.TEMPERATURE)[1] for example in made])
    assert np.abs(scores.entropy[0][0] - expected.numpy()).max() < bounds.logprob


def test_a_temperature_may_be_asked_for(rank, spec, folder, bounds):
    rank.build("actor", spec)
    made = examples([20, 30], VOCAB)
    [shard], _ = shards([made])
    [[column]] = rank.logprobs("actor", shard, 1.0)
    with torch.no_grad():
        model = torch_loop.load(folder)
        expected = torch.cat([torch_loop.scores(model, example, 1.0)[0] for example in made])
    assert np.abs(column - expected.numpy()).max() < bounds.logprob


def test_three_adam_steps_equal_a_plain_torch_loop(rank, spec, folder, bounds):
    rank.build("actor", spec)
    minis = [examples([9, 17, 30, 12], VOCAB, seed) for seed in range(3)]
    model = torch_loop.load(folder)
    # Warm-up over one step, then linear to min_lr at the fourth.
    losses, norms = torch_loop.train(model, minis, lrs=[1e-3, 7e-4, 4e-4], weight_decay=0.1, clip_grad=0.05)
    for index, mini in enumerate(minis):
        [shard], [columns] = shards([mini], micro_batches=2)
        metrics = rank.update("actor", shard, columns)
        assert metrics["actor/loss"] == pytest.approx(losses[index], abs=bounds.loss_abs)
        assert metrics["actor/grad_norm"] == pytest.approx(norms[index], rel=bounds.loss)
        assert norms[index] > 0.05, "the clip has to matter"
    assert metrics["actor/lr"] == pytest.approx(4e-4)
    expected, trained = model.state_dict(), weights(rank, "actor")
    assert max((trained[name] - expected[name]).abs().max().item() for name in trained) < bounds.weight


def test_the_likeliest_tokens_equal_transformers(rank, spec, folder, bounds):
    """Chosen of whole logits; log-probs at the role's temperature, those of all others together at the end."""
    rank.build("actor", spec)
    made = examples([20, 30], VOCAB)
    [shard], _ = shards([made], micro_batches=2)
    [parts] = rank.top("actor", shard, 5)
    with torch.no_grad():
        model = torch_loop.load(folder)
        for part, example in zip(parts, made, strict=True):
            logp = torch_loop.whole(model, example)
            top = logp.topk(6)
            assert (part[:, :5] == top.indices[:, :5].numpy())[
                (top.values[:, :5] - top.values[:, 1:] > 1e-4).numpy()
            ].all()
            rest = (1 - top.values[:, :5].exp().sum(1)).log()
            expected = torch.cat([top.values[:, :5], rest[:, None]], dim=1)
            assert np.abs(part[:, 5:] - expected.numpy()).max() < bounds.logprob


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation_at_the_likeliest_tokens_equals_plain_torch_on_whole_logits(rank, spec, folder, bounds, beta):
    objective = PolicyObjective(Algorithm(policy_loss="distill_top", distill_beta=beta))
    # Gradients stay whole, and as they are.
    still = Optimizer(name="sgd", lr=1e-30, clip_grad=1e9)
    rank.build("actor", dataclasses.replace(spec, objective=objective, optimizer=still))
    mini = examples([9, 17, 30, 12], VOCAB)
    [shard], [columns] = shards([mini], micro_batches=2)
    metrics = rank.update("actor", shard, columns)
    model = torch_loop.load(folder)
    loss = torch_loop.distill_top(model, mini, beta)
    loss.backward()
    assert metrics["actor/loss"] == metrics["actor/pg_loss"] == pytest.approx(loss.item(), abs=bounds.loss_abs)
    rest = torch.cat([torch.tensor(each.columns["teacher_top"][each.mask > 0, -1]).exp() for each in mini]).mean()
    assert metrics["actor/teacher_rest"] == pytest.approx(float(rest), rel=1e-5)
    expected = dict(model.named_parameters())
    found = {name: tensor.cpu() for bucket in rank.engine("actor").gradients(1 << 16) for name, tensor in bucket}
    for name, tensor in found.items():
        scale = expected[name].grad.abs().max()
        assert (tensor - expected[name].grad).abs().max() < bounds.gradient / 2 * scale + 1e-8, name


def test_mini_batches_of_one_update_are_optimizer_steps(rank, spec):
    minis = [examples([9, 17], VOCAB, seed) for seed in range(2)]
    rank.build("actor", spec)
    separate = [rank.update("actor", shard, column) for [shard], [column] in (shards([mini]) for mini in minis)]
    one_by_one = weights(rank, "actor")
    rank.build("actor", spec)
    [shard], [columns] = shards(minis)
    together = rank.update("actor", shard, columns)
    assert all(torch.equal(tensor, one_by_one[name]) for name, tensor in weights(rank, "actor").items())
    assert together["actor/pg_loss"] == pytest.approx(np.mean([metrics["actor/pg_loss"] for metrics in separate]))
    assert together["rollout/logprob_diff_max"] == max(m["rollout/logprob_diff_max"] for m in separate)
    assert together["actor/lr"] == separate[-1]["actor/lr"]


def test_one_optimizer_step_needs_no_log_probs_of_a_pass_before_it(rank, spec):
    """To the bit: weights and metrics after two updates, one of them over several micro-batches."""
    alone = dataclasses.replace(spec, objective=dataclasses.replace(spec.objective, old_given=False))
    made = [shards([examples([9, 40, 17], VOCAB, seed)], micro_batches=seed) for seed in (1, 2)]
    ended = []
    for each in (spec, alone):
        rank.build("actor", each)
        metrics = []
        for [shard], [columns] in made:
            given = dict(columns)
            del given["old_logprobs"]
            if each is spec:
                given["old_logprobs"] = rank.logprobs("actor", shard)
            metrics.append(rank.update("actor", shard, given))
        ended.append((metrics, [tensor.clone() for bucket in rank.buckets("actor", 1 << 20) for _, tensor in bucket]))
    assert ended[0][0] == ended[1][0] and ended[0][0][0]["actor/grad_norm"] > 0
    assert all(torch.equal(one, other) for one, other in zip(ended[0][1], ended[1][1], strict=True))


def test_the_first_of_several_optimizer_steps_needs_none_either(rank, spec):
    """To the bit, with what nobody may read in their place; the steps after it need them."""
    alone = dataclasses.replace(spec, objective=dataclasses.replace(spec.objective, old_given=False))
    [shard], [columns] = shards([examples(lengths, VOCAB) for lengths in ([9, 40], [12], [17])], micro_batches=2)
    ended = []
    for each, of in ((spec, "all"), (alone, "later")):
        rank.build("actor", each)
        old = rank.logprobs("actor", shard, of=of)
        assert [np.isnan(np.concatenate(mini)).all() for mini in old] == [of == "later", False, False]
        metrics = rank.update("actor", shard, columns | {"old_logprobs": old})
        ended.append((metrics, weights(rank, "actor")))
    assert ended[0][0] == ended[1][0] and ended[0][0]["actor/approx_kl"] > 0
    assert all(torch.equal(tensor, ended[1][1][name]) for name, tensor in ended[0][1].items())
    del columns["old_logprobs"]
    with pytest.raises(MegarlError, match="needs the columns"):
        rank.update("actor", shard, columns)


def test_where_one_optimizer_step_is_left_none_is_asked_for_log_probs(rank, spec):
    rank.build("actor", spec)
    [shard], _ = shards([examples([9], VOCAB)])
    [mini] = rank.logprobs("actor", shard, of="later")
    assert np.isnan(np.concatenate(mini)).all()
    assert rank.logprobs("actor", Shard(()), of="later") == []


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(2, 24), min_size=1, max_size=6), micro_batches=st.integers(1, 6))
def test_micro_batching_changes_nothing(rank, spec, bounds, lengths, micro_batches):
    mini = examples([*lengths, 8], VOCAB)
    results = []
    for cut in (1, micro_batches):
        rank.build("actor", spec)
        [shard], [columns] = shards([mini], micro_batches=cut)
        results.append(rank.update("actor", shard, columns))
    assert results[1] == pytest.approx(results[0], rel=10 * bounds.loss, abs=bounds.loss_abs / 2)


def test_zero_advantages_leave_a_plain_policy_where_it_is(rank, folder):
    spec = RoleSpec(folder, "float32", optimizer=Optimizer(lr=1e-3), total_steps=2, objective=POLICY)
    rank.build("actor", spec)
    before = weights(rank, "actor")
    [shard], [columns] = shards([examples([9, 12], VOCAB)])
    columns["advantages"] = [[np.zeros_like(column) for column in mini] for mini in columns["advantages"]]
    metrics = rank.update("actor", shard, columns)
    assert metrics["actor/grad_norm"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(rank, "actor").items())


def test_supervised_training_lowers_the_loss(rank, spec):
    rank.build("actor", dataclasses.replace(spec, objective=SftObjective()))
    [shard], _ = shards([examples([20, 30], VOCAB)] * 4)
    first = rank.update("actor", shard, {})["sft/loss"]
    assert rank.update("actor", shard, {})["sft/loss"] < first
    assert rank.engine("actor").num_steps == 8


def test_a_gradient_that_is_not_finite_is_refused_and_changes_no_weight(rank, spec):
    rank.build("actor", spec)
    before = weights(rank, "actor")
    [shard], [columns] = shards([examples([9, 12], VOCAB)])
    columns["advantages"][0][0][5] = np.nan
    with pytest.raises(MegarlError, match=r"optimizer step 1 is not finite.*rank 0"):
        rank.update("actor", shard, columns)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(rank, "actor").items())
    assert rank.engine("actor").num_steps == 0


def test_a_bad_gradient_is_left_out_where_the_recipe_says_so(rank, spec):
    rank.build("actor", dataclasses.replace(spec, optimizer=Optimizer(lr=1e-3, on_bad_gradient="skip")))
    before = weights(rank, "actor")
    [shard], [columns] = shards([examples([9, 12], VOCAB)] * 2)
    good = columns["advantages"][1][0].copy()
    for mini in columns["advantages"]:
        mini[0][5] = np.nan
    metrics = rank.update("actor", shard, columns)
    assert metrics["actor/skipped_steps"] == 2 and "actor/grad_norm" not in metrics
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(rank, "actor").items())
    columns["advantages"][1][0][:] = good
    metrics = rank.update("actor", shard, columns)
    assert metrics["actor/skipped_steps"] == 1 and np.isfinite(metrics["actor/grad_norm"])
    assert not all(torch.equal(tensor, before[name]) for name, tensor in weights(rank, "actor").items())
    assert all(tensor.isfinite().all() for tensor in weights(rank, "actor").values())
    assert rank.engine("actor").num_steps == 4  # the schedule counts all


def test_a_run_that_leaves_out_step_after_step_ends(rank, spec):
    rank.build("actor", dataclasses.replace(spec, optimizer=Optimizer(lr=1e-3, on_bad_gradient="skip")))
    [shard], [columns] = shards([examples([5], VOCAB)] * MOST_SKIPPED)
    for mini in columns["advantages"]:
        mini[0][2] = np.nan
    with pytest.raises(MegarlError, match=rf"step {MOST_SKIPPED} is not finite.*the last {MOST_SKIPPED} in a row"):
        rank.update("actor", shard, columns)


def test_a_spike_is_measured_by_what_a_checkpoint_remembers(rank, spec, tmp_path):
    watched = dataclasses.replace(spec, optimizer=Optimizer(lr=1e-6, spike_factor=3.0, on_bad_gradient="skip"))
    rank.build("actor", watched)
    [shard], [columns] = shards([examples([9, 12], VOCAB)] * FEWEST)
    assert rank.update("actor", shard, columns)["actor/skipped_steps"] == 0
    (tmp_path / "saved").mkdir()
    rank.save("actor", tmp_path / "saved")
    for mini in columns["advantages"]:
        mini[0] *= 1000
    there = rank.update("actor", shard, columns)["actor/skipped_steps"]
    rank.build("actor", watched)
    assert rank.update("actor", shard, columns)["actor/skipped_steps"] == 0  # a new run has nothing to measure by
    rank.load("actor", tmp_path / "saved")
    assert rank.update("actor", shard, columns)["actor/skipped_steps"] == there == FEWEST


def test_a_mini_batch_without_samples_on_this_rank_is_a_step_all_the_same(rank, spec):
    rank.build("actor", spec)
    [shard], [columns] = shards([examples([9, 12], VOCAB)])
    empty = Shard((*shard.mini_batches, MiniBatch(())))
    rank.update("actor", empty, {name: [*column, []] for name, column in columns.items()})
    assert rank.engine("actor").num_steps == 2


def test_bfloat16_trains_on_float32_main_weights(rank, folder):
    # Steps of 1e-5 are far below bfloat16's resolution of weights about 0.02: only main weights can add them up.
    optimizer = Optimizer(lr=1e-5)
    rank.build(
        "actor",
        RoleSpec(folder, "bfloat16", optimizer=optimizer, total_steps=100, objective=POLICY),
    )
    before = weights(rank, "actor")
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16}
    [shard], [columns] = shards([examples([9, 12, 30], VOCAB)] * 20)
    metrics = rank.update("actor", shard, columns)
    moved = sum((tensor != before[name]).sum().item() for name, tensor in weights(rank, "actor").items())
    assert moved > 100
    assert np.isfinite(list(metrics.values())).all()


def test_a_frozen_role_scores_and_refuses_the_rest(rank, folder):
    rank.build("reference", RoleSpec(folder, "float32"))
    [shard], [columns] = shards([examples([9, 12], VOCAB)])
    assert rank.logprobs("reference", shard)[0][0].shape == (21,)
    with pytest.raises(MegarlError, match="without an objective"):
        rank.update("reference", shard, columns)
    with pytest.raises(MegarlError, match="frozen role has no gradients"):
        list(rank.engine("reference").gradients(1 << 20))


def test_missing_columns_are_named(rank, spec):
    rank.build("actor", spec)
    [shard], [columns] = shards([examples([9], VOCAB)])
    with pytest.raises(MegarlError, match=r"needs the columns \['ref_logprobs'\]"):
        rank.update("actor", shard, {name: columns[name] for name in ("old_logprobs", "advantages")})


def test_a_warm_up_longer_than_the_run_is_refused(rank, folder):
    with pytest.raises(UserError, match=r"warmup_steps is 5.*at most 3"):
        rank.build("actor", RoleSpec(folder, "float32", optimizer=Optimizer(warmup_steps=5), total_steps=4))


def test_read_only_arrays_are_taken(rank, spec):
    """That is how arrays come out of an object store."""
    rank.build("actor", spec)
    [shard], _ = shards([examples([9], VOCAB)])
    for array in filter(lambda value: value is not None, vars(shard.mini_batches[0].micro_batches[0]).values()):
        array.flags.writeable = False
    assert isinstance(shard.mini_batches[0].micro_batches[0], MicroBatch)
    assert np.isfinite(rank.logprobs("actor", shard)[0][0]).all()


def test_the_actor_and_the_reference_share_a_process(rank, spec, folder):
    rank.build("actor", spec)
    rank.build("reference", RoleSpec(folder, "float32", torch_loop.TEMPERATURE))
    [shard], [columns] = shards([examples([9, 30], VOCAB)])
    assert np.array_equal(rank.logprobs("actor", shard)[0][0], rank.logprobs("reference", shard)[0][0])
    rank.update("actor", shard, columns)
    assert not np.array_equal(rank.logprobs("actor", shard)[0][0], rank.logprobs("reference", shard)[0][0])


def test_unknown_roles_are_named(rank):
    with pytest.raises(MegarlError, match="no role 'critic'"):
        rank.engine("critic")


def test_the_peak_of_memory_is_measured_by_what_was_done(rank, spec):
    rank.build("actor", spec)
    [shard], [columns] = shards([examples([9, 30], VOCAB)])
    rank.take_peaks()
    rank.logprobs("actor", shard)
    rank.update("actor", shard, columns)
    peaks = rank.take_peaks()
    assert set(peaks) == {"actor/logprobs", "actor/update"} and min(peaks.values()) > 2**20
    assert not rank.take_peaks()
