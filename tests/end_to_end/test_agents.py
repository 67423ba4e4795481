"""Episodes of several turns with real servers and ranks: what the policy wrote, turn by turn, is what the trainer sees."""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.caller import PRICES, make_caller
from tests.end_to_end.harness import Driver
from tests.end_to_end.test_async import SAME, STILL
from tests.support.processes import ended

pytestmark = pytest.mark.slow

# A model of random weights ends no turn: letters and digits do it in its place. The router takes 32 at most.
STOPS = f"rollout.stop={json.dumps([*string.ascii_lowercase, *string.digits[:5]])}"
GUESSING = ("agent.environment=guess_number", "agent.settings={low: 0, high: 2000, guesses: 3}", "agent.turn_tokens=24")
SHOP = Path(__file__).parents[1] / "agents" / "mcp_shop.py"
SCRIPT = Path(__file__).parent / "guessing.py"
PLAYED = (f"agent.command={json.dumps([sys.executable, str(SCRIPT), '3'])}", "agent.served_as=gpt-4o-mini")
SIZES = ("rollout.max_response_tokens=120", "data.max_prompt_tokens=64", "actor.micro_batch_tokens=1024")


@pytest.fixture
def caller(inputs: Path) -> Path:
    make_caller(inputs / "caller", inputs / "data" / "train.jsonl")
    return inputs / "caller"


def test_episodes_with_tools_are_carried_over_to_the_next_step_and_trained_on(
    launch: Callable[..., Driver], caller: Path, tmp_path: Path
) -> None:
    """The policy thinks, which its template drops, calls an MCP server's tool, and guesses. Weights stay as they are.

    Whatever version a turn is of, and in whichever sequence of its episode, its log-probs are the trainer's own.
    """
    pids = tmp_path / "pids"
    shop = f"agent.mcp={json.dumps([f'{sys.executable} {SHOP} {pids}'])}"
    calling = (f"model.path={caller}", shop, "agent.tool_parser=pythonic", "agent.rewritten=split", "agent.max_turns=4")
    ahead = ("rollout.max_staleness=1", "rollout.oversample=1.5", "rollout.offload=[kv_cache]")
    sizes = ("rollout.max_response_tokens=512", "data.max_prompt_tokens=64", "actor.micro_batch_tokens=1024")
    short = ("agent.environment=guess_number", GUESSING[1], "agent.turn_tokens=40", "train.steps=3", "eval.every=3")
    driver = launch("run.name=agents", *STILL, *ahead, *calling, *sizes, *short)
    code, _, error = driver.finish()
    assert code == 0, error
    rows = [row for row in driver.metrics() if row["step"]]
    assert len(rows) == 3
    for row in rows:
        assert row["rollout/logprob_diff_max"] < SAME and row["rollout/failed"] == 0, row
        assert row["rollout/num_samples"] == 16 and row["agent/environment_failures"] == 0
        assert 1 < row["agent/turns_mean"] <= row["agent/turns_max"] <= 4
        assert 1 < row["agent/sequences"] <= row["agent/turns_mean"], "each turn thinks, and what it thought is dropped"
        assert row["agent/tool_calls"] > row["agent/tool_failures"] / 16 and row["actor/grad_norm"] > 0
        assert row["agent/policy_tokens"] > 0 and row["agent/environment_tokens"] > 0
        assert "reward/by/environment/mean" in row and "reward/by/share_of_digits/mean" in row
    assert any(row["rollout/staleness_max"] == 1 and row["rollout/carried_tokens"] > 0 for row in rows)
    # Half as many groups as a step takes are ahead; behind the last step there is none.
    assert [row["rollout/groups_running"] + row["rollout/groups_finished"] for row in rows] == [2, 2, 0]
    assert all(row["eval/turns_mean"] >= 1 for row in driver.metrics() if "eval/accuracy" in row)
    lines = (driver.folder / "samples" / "step_000001.jsonl").read_text().splitlines()
    talks = [json.loads(line)["messages"] for line in lines]
    told = {(message["role"], message["content"]) for talk in talks for message in talk[2::2]}
    hints = {content for role, content in told if role == "user"}
    assert hints and hints <= {"higher", "lower", "no number"}
    prices = {content for role, content in told if role == "tool" and not content.startswith("error")}
    assert prices and prices <= {*PRICES.values()}
    assert all(message["role"] == "assistant" for talk in talks for message in talk[1::2])
    assert ended([int(line) for line in pids.read_text().split()])
    driver.assert_nothing_left()


def test_a_script_that_plays_at_the_endpoint_is_trained_on(launch: Callable[..., Driver]) -> None:
    """That its samples are those of the environment, to the bit: tests/agents/test_harness.py."""
    few = ("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "actor.mini_batch_samples=4", "train.steps=2")
    # The script bounds its game itself.
    driver = launch("run.name=outside", *PLAYED, *few, "data.eval=null", *SIZES, STOPS, "agent.turn_tokens=24")
    code, _, error = driver.finish()
    assert code == 0, error
    rows = [row for row in driver.metrics() if row["step"]]
    assert len(rows) == 2
    for row in rows:
        assert row["rollout/logprob_diff_max"] < SAME and row["actor/grad_norm"] > 0 and row["rollout/failed"] == 0
        assert row["rollout/num_samples"] == 4
    assert max(row["agent/turns_max"] for row in rows) > 1, "more than one request of an episode"
    driver.assert_nothing_left()
