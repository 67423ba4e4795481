"""Episodes of several turns with real servers and ranks: what the policy wrote, turn by turn, is what the trainer sees."""

from __future__ import annotations

import json
import string
from collections.abc import Callable

import pytest

from tests.end_to_end.harness import Driver
from tests.end_to_end.test_async import SAME, STILL

pytestmark = pytest.mark.slow

# A model of random weights ends no turn: letters and digits do it in its place. The router takes 32 at most.
STOPS = f"rollout.stop={json.dumps([*string.ascii_lowercase, *string.digits[:5]])}"
GUESSING = ("agent.environment=guess_number", "agent.settings={low: 0, high: 2000, guesses: 3}", "agent.turn_tokens=24")
SIZES = ("rollout.max_response_tokens=120", "data.max_prompt_tokens=64", "actor.micro_batch_tokens=1024")


def test_episodes_are_trained_on_while_servers_play_the_next(launch: Callable[..., Driver]) -> None:
    """Weights stay as they are: whatever version a turn is of, its log-probs are the trainer's own."""
    beside = ("rollout.max_staleness=1", "rollout.in_flight=abort")
    driver = launch("run.name=agents", *STILL, *beside, *GUESSING, *SIZES, STOPS, "train.steps=4", "eval.every=2")
    code, _, error = driver.finish()
    assert code == 0, error
    rows = [row for row in driver.metrics() if row["step"]]
    assert len(rows) == 4
    for row in rows:
        assert row["rollout/logprob_diff_max"] < SAME and row["rollout/failed"] == 0, row
        assert row["rollout/num_samples"] == 16 and row["agent/environment_failures"] == 0
        assert 1 < row["agent/turns_mean"] <= row["agent/turns_max"] <= 3
        assert row["agent/policy_tokens"] > 0 and row["agent/environment_tokens"] > 0
        assert "reward/by/environment/mean" in row and "reward/by/share_of_digits/mean" in row
    assert any(row["rollout/staleness_max"] == 1 for row in rows)
    assert all(row["eval/turns_mean"] >= 1 for row in driver.metrics() if "eval/accuracy" in row)
    lines = (driver.folder / "samples" / "step_000001.jsonl").read_text().splitlines()
    talks = [json.loads(line)["messages"] for line in lines]
    for talk in talks:
        assert [message["role"] for message in talk] == ["user", *["assistant", "user"] * len(talk)][: len(talk)]
        told = {message["content"] for message in talk[2::2]}
        assert told <= {"higher", "lower", "no number"}
    assert any(len(talk) > 2 for talk in talks)
    driver.assert_nothing_left()
