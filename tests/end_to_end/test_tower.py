"""PPO on images with a vision tower that learns, on the real engines: servers see with what the trainer has learned.

Of rows alone, and then replayed from its journal. The critic's own tower is frozen.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.end_to_end.harness import start
from tools.make_colors import make_colors
from tools.make_tiny_vision_model import make_tiny_vision_model

pytestmark = pytest.mark.slow

LEARNS = ("actor.optimizer.freeze_vision_tower=false", "actor.optimizer.lr=0.01")
PPO = ("algorithm.preset=ppo", "algorithm.kl_coef=0.01", "critic.parallel.pp=2", "critic.optimizer.lr=0.01")
SIZES = ("data.max_prompt_tokens=48", "actor.micro_batch_tokens=512", "actor.parallel.tp=2", "cluster.devices=2")


def test_servers_see_with_a_tower_that_has_learned(tmp_path: Path) -> None:
    """Each step's rollouts are of the tower of the step before: the trainer says the same of them."""
    make_tiny_vision_model(tmp_path / "model", kind="qwen3_vl", hidden_size=64)
    make_colors(tmp_path / "data", squares=2, num_train=32, num_eval=8, num_sft=1)
    run = start(tmp_path, "train.steps=3", "train.journal_keep=all", *LEARNS, *PPO, *SIZES, "sync.verify=hash")
    code, _, error = run.finish()
    assert code == 0, error
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in rows[1:])
    trained, was = (
        transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (run.folder / "hf", tmp_path / "model")
    )
    moved = {name for name, tensor in was.items() if not torch.equal(tensor, trained[name])}
    # What the tower saw last is added behind the model's last layer, where nobody looks at images any more.
    learns = {name for name in was if ".visual." in name and ".deepstack_merger_list.1." not in name}
    assert learns and learns <= moved
    critic, own = (
        {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        for folder in (run.folder / "hf_critic", tmp_path / "model")
    )
    differs = {name for name in own.keys() & critic.keys() if not torch.equal(own[name], critic[name])}
    assert differs and not any(".visual." in name for name in differs)
    # The probe has an image, and hashes are of the tower as well.
    assert all(row["sync/probe_diff_max"] < 1e-4 and row["sync/hashed_tensors"] > len(learns) for row in rows)

    replay = start(tmp_path, run=run.folder, command="replay")
    code, out, error = replay.finish()
    assert code == 0, error
    assert "in the 3 steps are the run's, to the bit (steps 1 to 3)." in out
