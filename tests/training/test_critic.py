"""A score head: values like transformers', a value loss like a hand-written one, and a folder that transformers loads."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from megarl.core.errors import MegarlError
from megarl.models.hf_config import load_model_config
from megarl.recipe.roles import Optimizer
from megarl.training.spec import RoleSpec, ValueObjective
from tests.training.harness import VOCAB, weights
from tests.training.samples import examples, shards

LENGTHS = [9, 17, 30, 12]
CLIP = 0.2


def critic(folder, **changes):
    optimizer = Optimizer(lr=1e-3, eps=1e-6, clip_grad=0.5)
    spec = RoleSpec(folder, "float32", optimizer=optimizer, total_steps=4, head="score", objective=ValueObjective(CLIP))
    return dataclasses.replace(spec, **changes)


def with_targets(micro_batches=1, seed=0):
    """A shard, columns of old values and returns, and the examples themselves."""
    made = examples(LENGTHS, VOCAB, seed)
    [shard], [columns] = shards([made], micro_batches=micro_batches)
    return shard, {"values": columns["old_logprobs"], "returns": columns["advantages"]}, made


def by_hand(model, example):
    """[T]: the score of every position."""
    hidden = model.model(input_ids=torch.tensor(example.tokens)[None]).last_hidden_state
    return model.score(hidden)[0, :, 0]


def test_values_are_the_scores_of_transformers(rank, scored, bounds):
    assert load_model_config(scored).head == "score"
    rank.build("critic", critic(scored))
    shard, _, made = with_targets()
    model = AutoModelForSequenceClassification.from_pretrained(scored, dtype=torch.float32)
    with torch.no_grad():
        expected = torch.cat([by_hand(model, example) for example in made])
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(torch.tensor(rank.values("critic", shard)[0][0]), expected, atol=bounds.logprob, rtol=0)


def test_updates_are_those_of_a_hand_written_loop(rank, scored, bounds):
    rank.build("critic", critic(scored))
    model = AutoModelForSequenceClassification.from_pretrained(scored, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    for seed in range(3):
        shard, columns, made = with_targets(micro_batches=2, seed=seed)
        metrics = rank.update("critic", shard, columns)
        optimizer.zero_grad()
        total = sum(float(example.mask.sum()) for example in made)
        loss = torch.zeros(())
        for example in made:
            values, mask = by_hand(model, example), torch.tensor(example.mask)
            old, returns = (torch.tensor(example.columns[name]) for name in ("old_logprobs", "advantages"))
            clipped = old + (values - old).clamp(-CLIP, CLIP)
            worst = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2
            loss = loss + (worst * mask).sum() / total
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert metrics["critic/vf_loss"] == pytest.approx(loss.item(), rel=bounds.loss)
        assert metrics["critic/grad_norm"] == pytest.approx(float(norm), rel=bounds.loss)
    trained = weights(rank, "critic")
    assert trained.keys() == dict(model.named_parameters()).keys()
    assert max((trained[name] - tensor).abs().max() for name, tensor in model.named_parameters()) < bounds.weight


def test_a_critic_of_a_language_model_begins_at_zero_and_learns(rank, folder, tmp_path):
    rank.build("critic", critic(folder, objective=ValueObjective()))
    shard, columns, _ = with_targets()
    assert not np.any(rank.values("critic", shard)[0][0])
    for _ in range(2):
        rank.update("critic", shard, columns)
    learned = rank.values("critic", shard)[0][0]
    assert np.any(learned)
    (tmp_path / "checkpoint").mkdir()
    rank.save("critic", tmp_path / "checkpoint")
    rank.export_hf("critic", folder, tmp_path / "hf")
    rank.build("critic", critic(folder, objective=ValueObjective()))
    rank.load("critic", tmp_path / "checkpoint")
    assert np.array_equal(rank.values("critic", shard)[0][0], learned)
    rank.build("reward", critic(tmp_path / "hf", optimizer=None))
    assert np.array_equal(rank.values("reward", shard)[0][0], learned)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").score.weight.any()


def test_a_policy_has_no_values(rank, spec):
    rank.build("actor", spec)
    shard, _, _ = with_targets()
    with pytest.raises(MegarlError, match="build it with head='score'"):
        rank.values("actor", shard)
