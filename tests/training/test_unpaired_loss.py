"""KTO on a rank: a hand-written loop over transformers takes the same steps, its KL among them."""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from megarl.core.errors import MegarlError
from megarl.core.layout import Layout
from megarl.recipe.roles import Lora, Optimizer
from megarl.recipe.supervised import Kto
from megarl.training.batch import filler, to_device
from megarl.training.logprob import TokenScores
from megarl.training.losses import build_loss
from megarl.training.metrics import MetricSums
from megarl.training.spec import KtoObjective, RoleSpec
from tests.support.tolerances import tolerance
from tests.training import torch_loop
from tests.training.harness import VOCAB, weights
from tests.training.labelled import is_desirable, labelled_shards
from tests.training.samples import examples

LENGTHS = [9, 17, 30, 12, 5, 21, 8]
OPTIMIZER = Optimizer(lr=1e-3, eps=1e-6, clip_grad=0.5)
KTO = Kto(beta=0.3, desirable_weight=1.5, undesirable_weight=0.75)


def kto_spec(folder, **changes):
    return RoleSpec(folder, "float32", optimizer=OPTIMIZER, total_steps=4, objective=KtoObjective(KTO), **changes)


def log_ratio(model, example, further=0.0):
    """Of the policy and the reference, over the response."""
    logprobs, _ = torch_loop.scores(model, example, 1.0)
    return (logprobs - torch.tensor(example.columns["ref_logprobs"]) + further)[torch.tensor(example.mask) > 0].sum()


def divergence(model, mini, further):
    """Mean over the rows; not below 0."""
    with torch.no_grad():
        return max(0.0, sum(log_ratio(model, example, further).item() for example in mini) / len(mini))


def kto_loss(model, mini, kl):
    """One answer at a time, from the formula: lambda - value, where value is lambda sigmoid of the reward beside the KL."""
    total = torch.zeros(())
    for index, example in enumerate(mini):
        ratio = log_ratio(model, example)
        if is_desirable(index):
            total = total + 1.5 - 1.5 * torch.sigmoid(0.3 * (ratio - kl))
        else:
            total = total + 0.75 - 0.75 * torch.sigmoid(0.3 * (kl - ratio))
    return total / len(mini)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_updates_are_those_of_a_hand_written_loop(rank, folder, micro_batches):
    rank.build("kto", kto_spec(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    allowed = tolerance(rank.platform)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    found = []
    # The last of the mean log-ratios is below 0.
    for seed, further in enumerate((0.2, 0.1, -0.5)):
        # Other rows stand in the place of the mismatched ones.
        mini, others = examples(LENGTHS, VOCAB, seed), examples(LENGTHS, VOCAB, 7 + seed)
        [shard], [columns] = labelled_shards(mini, micro_batches=micro_batches)
        [mismatched], [theirs] = labelled_shards(others, micro_batches=micro_batches, further=further)
        kl = max(0.0, rank.evaluate("kto", mismatched, theirs)["kto/log_ratio"])
        found.append(kl)
        assert kl == pytest.approx(divergence(model, others, further), rel=allowed.loss)
        metrics = rank.update("kto", shard, columns, kl)
        optimizer.zero_grad()
        loss = kto_loss(model, mini, divergence(model, others, further))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        optimizer.step()
        assert metrics["kto/kl"] == pytest.approx(kl)
        assert metrics["kto/loss"] == pytest.approx(loss.item(), rel=allowed.loss)
        assert metrics["kto/grad_norm"] == pytest.approx(float(norm), rel=allowed.loss)
    assert found[0] > 0.5 and found[2] == 0
    trained = weights(rank, "kto")
    assert max((trained[name] - tensor).abs().max() for name, tensor in model.named_parameters()) < allowed.weight


def test_evaluation_reports_what_an_update_would_and_learns_nothing(rank, folder):
    rank.build("kto", kto_spec(folder))
    [shard], [columns] = labelled_shards(examples(LENGTHS, VOCAB), micro_batches=2)
    before = weights(rank, "kto")
    metrics = rank.evaluate("kto", shard, columns, 0.25)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(rank, "kto").items())
    updated = rank.update("kto", shard, columns, 0.25)
    assert metrics == pytest.approx({name: updated[name] for name in metrics}, rel=tolerance(rank.platform).split)
    named = ("loss", "accuracy", "log_ratio", "kl", "desirable_reward", "undesirable_reward")
    assert metrics.keys() == {f"kto/{name}" for name in named}


def test_kto_without_its_reference_is_refused(rank, folder):
    rank.build("kto", kto_spec(folder))
    [shard], _ = labelled_shards(examples(LENGTHS, VOCAB))
    for method in (rank.update, rank.evaluate):
        with pytest.raises(MegarlError, match=r"needs the columns \['ref_logprobs'\]"):
            method("kto", shard, {})


def test_at_the_reference_no_answer_is_on_either_side(rank, folder):
    """The adapters begin at nothing: the base is the policy, rewards and KL are 0, and so each row's loss is half its weight."""
    rank.build("kto", kto_spec(folder, lora=Lora(rank=4)))
    rank.build("reference", RoleSpec(folder, "float32", base_of="kto"))
    [shard], _ = labelled_shards(examples(LENGTHS, VOCAB))
    columns = {"ref_logprobs": rank.logprobs("reference", shard)}
    first = rank.update("kto", shard, columns)
    assert (first["kto/accuracy"], first["kto/log_ratio"], first["kto/desirable_reward"]) == (0.5, 0, 0)
    assert first["kto/loss"] == pytest.approx((3 * 1.5 + 4 * 0.75) / 7 / 2)
    later = [rank.update("kto", shard, columns) for _ in range(3)]
    assert later[-1]["kto/loss"] < first["kto/loss"]
    assert later[-1]["kto/desirable_reward"] > 0 > later[-1]["kto/undesirable_reward"]


@pytest.mark.usefixtures("on_device")
def test_numbers_by_hand(device):
    """Log-ratios 2 and -1 beside a KL of 0.5; beta is 0.3. The first answer is desirable, the second is not."""
    [shard], _ = labelled_shards(examples([3, 5], VOCAB))
    [micro] = shard.mini_batches[0].micro_batches
    batch = to_device(micro, {"ref_logprobs": np.full(8, -3, np.float32)}, device, Layout(), 0)
    # The response's labels are at 1 of the first, 2 and 3 of the second.
    scores = torch.full((8,), 99.0)
    scores[[1, 5, 6]] = torch.tensor([-1.0, -3.5, -3.5])
    scores = scores.to(device).requires_grad_()
    output = build_loss(KtoObjective(KTO), lambda part: part).at(0.5).fn(TokenScores(scores, None), batch)
    good, bad = 1 / (1 + math.exp(-0.3 * 1.5)), 1 / (1 + math.exp(-0.3 * 1.5))
    assert output.loss.item() == pytest.approx((1.5 * (1 - good) + 0.75 * (1 - bad)) / 2)
    assert output.weighted["kto/accuracy"].item() == pytest.approx(1.0)
    assert output.weighted["kto/log_ratio"].item() == pytest.approx((2 - 1) / 2)
    sums = {name: (value / weight).item() for name, (value, weight) in output.means.items()}
    assert sums == pytest.approx({"kto/desirable_reward": 0.6, "kto/undesirable_reward": -0.3})
    output.loss.backward()
    # d/dr lambda (1 - sigmoid(beta (r - kl))) = -lambda beta s (1 - s), of each trained label.
    assert scores.grad.tolist() == pytest.approx(
        [0, -1.5 * 0.3 * good * (1 - good) / 2, 0, 0, 0, *[0.75 * 0.3 * bad * (1 - bad) / 2] * 2, 0]
    )


def test_a_step_without_desirable_answers_says_nothing_of_them(rank, device):
    loss, sums = build_loss(KtoObjective(KTO), lambda part: part), MetricSums()
    for micro in labelled_shards(examples([13, 22, 9], VOCAB))[0][0].mini_batches[0].micro_batches:
        batch = to_device(micro, {"ref_logprobs": np.zeros(44, np.float32)}, device, Layout(), 0)
        batch.desirable.zero_()
        sums.add(loss.fn(TokenScores(torch.zeros(44, device=device), None), batch))
    sums.end_mini_batch()
    found = sums.reduce(rank.groups_of(Layout()).dp_cp)
    assert "kto/undesirable_reward" in found and "kto/desirable_reward" not in found


@pytest.mark.usefixtures("on_device")
def test_a_filler_counts_for_nothing(device):
    batch = filler(device, Layout(), {"ref_logprobs": torch.zeros(1)})
    scores = torch.zeros(1, device=device, requires_grad=True)
    output = build_loss(KtoObjective(KTO), lambda part: part).at(1.0).fn(TokenScores(scores, None), batch)
    output.loss.backward()
    assert output.loss.item() == 0 and scores.grad.tolist() == [0]


class Waits(TorchDispatchMode):
    """Notes what a host waits for a device in: how many elements a mask chooses, and numbers of tensors."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        masks = name == "aten::index" and any(each is not None and each.dtype == torch.bool for each in args[1])
        if masks or name in ("aten::nonzero", "aten::masked_select", "aten::_local_scalar_dense"):
            self.found.add(name)
        return func(*args, **(kwargs or {}))


def test_a_device_is_not_waited_for(device):
    [shard], [columns] = labelled_shards(examples(LENGTHS, VOCAB), micro_batches=1)
    [micro] = shard.mini_batches[0].micro_batches
    batch = to_device(micro, {"ref_logprobs": columns["ref_logprobs"][0][0]}, device, Layout(), 0)
    with Waits() as waits:
        build_loss(KtoObjective(KTO), lambda sums: sums).at(0.3).fn(
            TokenScores(torch.zeros_like(batch.mask), None), batch
        )
    assert waits.found == set()
