"""Losses of pairs on a rank: hand-written loops over transformers take the same steps; the export scores alike."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.core.errors import MegarlError
from megarl.core.layout import Layout
from megarl.recipe.roles import Lora, Optimizer
from megarl.recipe.supervised import Dpo
from megarl.training.batch import filler, to_device
from megarl.training.logprob import TokenScores
from megarl.training.losses import build_loss
from megarl.training.metrics import MetricSums
from megarl.training.spec import DpoObjective, RewardObjective, RoleSpec
from tests.support.tolerances import tolerance
from tests.training import torch_loop
from tests.training.harness import VOCAB, weights
from tests.training.pairs import margin_of, pair_shards, pairs_of, preference_loss
from tests.training.samples import examples

LENGTHS = [9, 17, 30, 12, 5, 21, 8, 8]
CENTER = 0.05
OPTIMIZER = Optimizer(lr=1e-3, eps=1e-6, clip_grad=0.5)
DPO = Dpo(beta=0.3, label_smoothing=0.1)


def reward_spec(folder, **changes):
    spec = RoleSpec(
        folder, "float32", optimizer=OPTIMIZER, total_steps=4, head="score", objective=RewardObjective(CENTER)
    )
    return dataclasses.replace(spec, **changes)


def dpo_spec(folder, settings=DPO, **changes):
    spec = RoleSpec(folder, "float32", optimizer=OPTIMIZER, total_steps=4, objective=DpoObjective(settings))
    return dataclasses.replace(spec, **changes)


def hf_score(model, example):
    """What transformers' own classifier says of a whole sequence."""
    return model(input_ids=torch.tensor(example.tokens)[None]).logits[0, 0]


def reward_loss(model, mini):
    """One pair at a time, from the formula."""
    total = torch.zeros(())
    for index, (chosen, rejected) in enumerate(pairs_of(mini)):
        better, worse = hf_score(model, chosen), hf_score(model, rejected)
        total = total - torch.log(torch.sigmoid(better - worse - margin_of(index))) + CENTER * (better + worse) ** 2
    return total / (len(mini) // 2)


def dpo_loss(model, mini, settings):
    """One pair at a time, from the formula."""

    def said(side):
        kept = torch.tensor(side.mask) > 0
        return torch_loop.scores(model, side, 1.0)[0][kept], torch.tensor(side.columns["ref_logprobs"])[kept]

    pairs = enumerate(pairs_of(mini))
    each = [preference_loss(settings, *map(said, pair), margin=margin_of(index)) for index, pair in pairs]
    return sum(each) / (len(mini) // 2)


def same_steps(rank, role, model, loss_of, *, scored):
    """Three updates by both; returns the last metrics of the rank."""
    allowed = tolerance(rank.platform)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    for seed in range(3):
        mini = examples(LENGTHS, VOCAB, seed)
        [shard], [columns] = pair_shards(mini, micro_batches=2, scored=scored)
        metrics = rank.update(role, shard, columns)
        optimizer.zero_grad()
        loss = loss_of(model, mini)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        optimizer.step()
        assert metrics[f"{role}/loss"] == pytest.approx(loss.item(), rel=allowed.loss)
        assert metrics[f"{role}/grad_norm"] == pytest.approx(float(norm), rel=allowed.loss)
    trained = weights(rank, role)
    assert max((trained[name] - tensor).abs().max() for name, tensor in model.named_parameters()) < allowed.weight
    return metrics


def test_reward_updates_are_those_of_a_hand_written_loop(rank, scored):
    rank.build("rm", reward_spec(scored))
    model = AutoModelForSequenceClassification.from_pretrained(scored, dtype=torch.float32)
    metrics = same_steps(rank, "rm", model, reward_loss, scored=True)
    assert metrics["rm/lr"] == 1e-3 and 0 <= metrics["rm/accuracy"] <= 1


@pytest.mark.parametrize(
    "settings",
    [
        DPO,
        Dpo(beta=0.3, loss="ipo", sft_coef=0.5),
        Dpo(beta=2.0, length_normalized=True),
        Dpo(beta=2.0, margin=0.5, loss="simpo"),
        Dpo(beta=0.3, loss="orpo"),
        Dpo(beta=0.3, loss="robust", label_smoothing=0.2),
        Dpo(beta=0.3, loss="hinge", margin=0.2),
        Dpo(beta=0.3, loss="apo_zero"),
        Dpo(beta=0.3, loss="apo_down", margin=0.2),
    ],
    ids=lambda settings: settings.loss,
)
def test_dpo_updates_are_those_of_a_hand_written_loop(rank, folder, settings):
    rank.build("dpo", dpo_spec(folder, settings))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    same_steps(rank, "dpo", model, lambda model, mini: dpo_loss(model, mini, settings), scored=False)


def test_an_export_scores_last_tokens_as_transformers_do(rank, folder, tmp_path):
    rank.build("rm", reward_spec(folder))
    mini = examples(LENGTHS, VOCAB)
    [shard], _ = pair_shards(mini, scored=True)
    for _ in range(2):
        rank.update("rm", shard, {})
    rank.export_hf("rm", folder, tmp_path / "hf")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert type(model).__name__ == "Qwen3ForSequenceClassification" and model.num_labels == 1
    with torch.no_grad():
        expected = [hf_score(model, example).item() for example in mini]
    [[column]] = rank.values("rm", shard)
    found = column[np.cumsum([len(example.tokens) for example in mini]) - 1]
    assert np.abs(found).max() > 1e-3
    assert found == pytest.approx(expected, abs=tolerance(rank.platform).logprob)


def test_evaluation_reports_what_an_update_would_and_learns_nothing(rank, folder):
    for role, spec, scored in (("rm", reward_spec(folder), True), ("dpo", dpo_spec(folder), False)):
        rank.build(role, spec)
        [shard], [columns] = pair_shards(examples(LENGTHS, VOCAB), micro_batches=2, scored=scored)
        rank.update(role, shard, columns)
        before = weights(rank, role)
        metrics = rank.evaluate(role, shard, columns)
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(rank, role).items())
        updated = rank.update(role, shard, columns)
        assert metrics == pytest.approx({name: updated[name] for name in metrics}, rel=tolerance(rank.platform).split)
        assert updated.keys() - metrics.keys() == {
            f"{role}/{name}" for name in ("grad_norm", "grad_share_max", "lr", "skipped_steps")
        }


@pytest.mark.parametrize("ahead", [1.0, 0.0])
def test_a_share_of_pairs_is_exact_whatever_their_weights_round_to(rank, device, ahead):
    """Weights of 1 / (pairs x tokens) sum to 1 in exact numbers alone."""
    loss, sums = build_loss(DpoObjective(Dpo()), lambda part: part), MetricSums()
    [shard], _ = pair_shards(examples([13, 22, 61, 38, 7, 90], VOCAB), micro_batches=2, scored=False)
    for micro in shard.mini_batches[0].micro_batches:
        side = np.repeat(np.arange(len(micro.cu_seqlens) - 1), np.diff(micro.cu_seqlens)) % 2
        batch = to_device(micro, {"ref_logprobs": np.zeros(len(side), np.float32)}, device, Layout(), 0)
        scores = torch.tensor(np.where(side == 0, ahead, 0.0), dtype=torch.float32, device=device)
        sums.add(loss.fn(TokenScores(scores, None), batch))
    sums.end_mini_batch()
    assert sums.reduce(rank.groups_of(Layout()).dp_cp)["dpo/accuracy"] == (1.0 if ahead else 0.5)


def test_dpo_without_its_reference_is_refused(rank, folder):
    rank.build("dpo", dpo_spec(folder))
    [shard], _ = pair_shards(examples(LENGTHS, VOCAB), scored=False)
    for method in (rank.update, rank.evaluate):
        with pytest.raises(MegarlError, match=r"needs the columns \['ref_logprobs'\]"):
            method("dpo", shard, {})


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_a_loss_without_a_reference_takes_no_column(rank, folder, loss):
    rank.build("dpo", dpo_spec(folder, Dpo(loss=loss)))
    [shard], _ = pair_shards(examples(LENGTHS, VOCAB), scored=False)
    assert rank.evaluate("dpo", shard, {}).keys() == {
        f"dpo/{name}" for name in ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward")
    }


def test_at_the_reference_nothing_is_ahead(rank, folder):
    """The adapters begin at nothing: the base is the policy, and every reward 0."""
    settings = Dpo()
    rank.build("dpo", dpo_spec(folder, settings, lora=Lora(rank=4)))
    rank.build("reference", RoleSpec(folder, "float32", base_of="dpo"))
    [shard], _ = pair_shards(examples(LENGTHS, VOCAB), scored=False)
    columns = {"ref_logprobs": rank.logprobs("reference", shard)}
    first = rank.update("dpo", shard, columns)
    assert (first["dpo/accuracy"], first["dpo/chosen_reward"], first["dpo/margin"]) == (0.5, 0, 0)
    later = [rank.update("dpo", shard, {"ref_logprobs": rank.logprobs("reference", shard)}) for _ in range(3)]
    assert later[-1]["dpo/loss"] < first["dpo/loss"] and later[-1]["dpo/margin"] > 0


@pytest.mark.usefixtures("on_device")
def test_numbers_by_hand(device):
    """Scores 2 and 1, margin 1: the lead is 0. Scores 0 and 3, margin 0: the lead is -3."""
    mini = examples([3, 2, 2, 4], VOCAB)
    [shard], _ = pair_shards(mini, scored=True)
    [micro] = shard.mini_batches[0].micro_batches
    batch = to_device(dataclasses.replace(micro, margins=np.array([1, 0], np.float32)), {}, device, Layout(), 0)
    scores = torch.full((11,), 99.0)
    scores[[2, 4, 6, 10]] = torch.tensor([2.0, 1.0, 0.0, 3.0])
    scores.requires_grad_()
    output = build_loss(RewardObjective(0.5), lambda part: part).fn(TokenScores(scores, None), batch)
    assert output.loss.item() == pytest.approx((math.log(2) + math.log(1 + math.exp(3)) + 0.5 * (9 + 9)) / 2)
    found = {name: value.item() for name, value in output.weighted.items()}
    assert found["rm/accuracy"] == 0.5 and found["rm/margin"] == -1 and found["rm/score"] == 1.5
    output.loss.backward()
    assert scores.grad.nonzero().flatten().tolist() == [2, 4, 6, 10]


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("objective", [RewardObjective(), DpoObjective(Dpo())])
def test_a_filler_is_no_pair(objective, device):
    batch = filler(device, Layout(), {"ref_logprobs": torch.zeros(1)})
    scores = torch.ones(1, requires_grad=True)
    output = build_loss(objective, lambda part: part).fn(TokenScores(scores, None), batch)
    output.loss.backward()
    assert output.loss.item() == 0 and scores.grad.tolist() == [0]
    assert all(value.item() == 0 for value in output.weighted.values())
