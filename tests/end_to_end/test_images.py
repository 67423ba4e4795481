"""GRPO on rows and environments with images, on the real engines: what servers see, ranks see; then replayed from its journal."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

import pytest
import torch
import transformers

from megarl.models.hf_files import read_index
from megarl.models.tower_files import tower_index
from tests.end_to_end.harness import start
from tests.end_to_end.looking import TURNS
from tests.end_to_end.test_agents import STOPS
from tools.make_colors import COLORS, make_colors
from tools.make_tiny_vision_model import make_tiny_vision_model

pytestmark = pytest.mark.slow

LOOKING = ("agent.environment=tests.end_to_end.looking:Look", "agent.turn_tokens=16", "reward.fn=null", STOPS)
SIZES = ("data.max_prompt_tokens=48", "rollout.max_response_tokens=120", "actor.micro_batch_tokens=512")


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Images of two sizes, of which the text part's layers take what the tower saw in two places."""
    make_tiny_vision_model(tmp_path / "model", kind="qwen3_vl", hidden_size=64)
    make_colors(tmp_path / "data", squares=2, num_train=32, num_eval=8, num_sft=1)
    make_colors(tmp_path / "more", squares=3, num_train=32, num_eval=1, num_sft=1)
    with (tmp_path / "data" / "train.jsonl").open("a") as rows:
        for line in (tmp_path / "more" / "train.jsonl").read_text().splitlines():
            row = json.loads(line)
            rows.write(json.dumps(row | {"images": [f"../more/{row['images'][0]}"]}) + "\n")
    return tmp_path


def test_a_run_sees_images_as_its_servers_do_and_is_replayed_to_the_bit(inputs: Path) -> None:
    """A first turn is what a single one is: a prompt with the row's image. Each later one has the environment's, too."""
    words = ("train.steps=2", "train.journal_keep=all", "actor.parallel.tp=2", "cluster.devices=2")
    run = start(inputs, *words, *LOOKING, *SIZES, "sync.verify=hash", "report.samples=4")
    code, _, error = run.finish()
    assert code == 0, error
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in rows[1:])
    assert all(row["actor/grad_norm"] > 0 for row in rows[1:])
    samples = [json.loads(line) for line in (run.folder / "samples" / "step_000001.jsonl").read_text().splitlines()]
    assert {sample["answer"] for sample in samples} <= set(COLORS)
    assert TURNS in {sample["images"] for sample in samples if sample["status"] != "failed"}

    exported, model = run.folder / "hf", inputs / "model"
    tower = tower_index(model)
    assert tower
    assert tower.keys() <= read_index(exported).keys() and read_index(exported).keys() == read_index(model).keys()
    trained, was = (
        transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (exported, model)
    )
    moved = {name for name, tensor in was.items() if not torch.equal(tensor, trained[name])}
    assert moved and not any("visual" in name for name in moved)

    replay = start(inputs, run=run.folder, command="replay")
    code, out, error = replay.finish()
    assert code == 0, error
    assert "in the 2 steps are the run's, to the bit (steps 1 to 2)." in out
    for file in exported.glob("*.safetensors"):
        assert filecmp.cmp(file, run.folder / "replay-1" / "hf" / file.name, False)
