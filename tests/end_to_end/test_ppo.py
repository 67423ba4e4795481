"""PPO from the command line: critic, reference and reward model at layouts of their own, checkpoints of all that learns."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from tests.end_to_end.harness import Driver, start

pytestmark = pytest.mark.slow

PPO = (
    "algorithm.preset=ppo",
    "algorithm.kl_coef=0.1",
    "algorithm.kl_control.target=0.01",
    "algorithm.kl_control.horizon=100",
    "algorithm.correction={}",
    "cluster.devices=2",
    "actor.parallel.tp=2",
    "reference.refresh_every=2",
    "critic.parallel.pp=2",
    "critic.warmup_steps=1",
    "critic.epochs=2",
    "critic.optimizer.lr=1e-3",
    "train.async_save=true",
)
# Elsewhere than in the run that was saved: the checkpoint is read at other layouts.
APART = (
    "actor.parallel.tp=1",
    "critic.parallel.pp=1",
    "placement.pools={a: {devices: 1, roles: [actor, reference]}, b: {devices: 1, roles: [critic, reward_model]}}",
    "train.keep_last=1",
    "train.save_every=100",  # where a step is saved, everybody is waited for in it
)


@pytest.fixture(scope="module")
def trained(inputs: Path) -> Driver:
    driver = start(inputs, "run.name=ppo", *PPO)
    code, _, error = driver.finish()
    assert code == 0, error
    driver.assert_nothing_left()
    return driver


def test_every_role_does_its_part(trained: Driver) -> None:
    rows = trained.metrics()[1:]
    assert len(rows) == 3
    assert "actor/pg_loss" not in rows[0] and all("actor/pg_loss" in row for row in rows[1:])
    assert rows[0]["critic/values"] != rows[1]["critic/values"]
    for row in rows:
        assert row["critic/vf_loss"] > 0 and row["critic/grad_norm"] > 0
        assert "critic/explained_variance" in row and row["perf/values_s"] > 0
        assert row["rollout/correction_touched"] == 0 and row["rollout/correction_ess"] == pytest.approx(1, abs=1e-3)
    # In warm-up the policy is the reference, and again after the refresh at the end of step 2.
    assert [abs(row["reward/kl"]) < 1e-6 for row in rows] == [True, True, True]
    coefficients = [row["reward/kl_coef"] for row in rows]
    # The first step is the critic's alone: the KL of an actor that stands still says nothing of the weight.
    assert 0.1 == coefficients[0] == coefficients[1] > coefficients[2]


def test_a_run_goes_on_with_all_that_was_saved_and_a_critic_apart_learns_beside_the_next_rollout(
    trained: Driver, inputs: Path
) -> None:
    """That what it learns is the same as where it is waited for: tests/test_train.py.

    Beside the critic is a reward model: the critic that was exported before.
    """
    newest = trained.folder / "checkpoints" / "step_000003"
    assert {"actor", "critic", "reference"} <= {path.name for path in newest.iterdir()}
    exported, before = trained.folder.with_name("exported_critic"), trained.metrics()
    (trained.folder / "hf_critic").rename(exported)
    model = AutoModelForSequenceClassification.from_pretrained(exported)
    assert model.config.num_labels == 1 and model.score.weight.abs().sum() > 0
    scored = (f"reward_model.path={exported}", "reward_model.weight=0.5")
    driver = start(inputs, "run.name=ppo", *PPO, *APART, *scored, "train.steps=5", "--resume", "--discard-journal")
    code, _, error = driver.finish()
    assert code == 0, error
    driver.assert_nothing_left()
    logs = {path.name for path in (driver.folder / "logs").glob("?_rank_*.log")}
    assert logs == {"a_rank_0.log", "b_rank_0.log"}
    assert driver.metrics()[:4] == before
    rows = driver.metrics()[4:]
    assert [row["step"] for row in rows] == [4, 5]
    assert all(row["critic/vf_loss"] > 0 and "reward/model_score" in row for row in rows)
    # The actor has learned in step 3, and the reference is what it was refreshed to in step 2.
    assert abs(rows[0]["reward/kl"]) > 1e-7
    assert rows[0]["reward/kl_coef"] < before[3]["reward/kl_coef"]
    # What is waited for the critic's first update, if anything, counts in the second step.
    assert "perf/critic_s" not in rows[0]
    assert all("perf/critic_s" in row for row in before[1:]), "on the actor's devices it is waited for"
