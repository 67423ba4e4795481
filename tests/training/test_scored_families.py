"""Reward models and critics of families whose weights lie otherwise in the checkpoint: scores like transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from megarl.models.hf_config import load_model_config
from megarl.training.rank import Rank
from tests.support.tiny import tiny_config, write_tokenizer
from tests.support.tolerances import Tolerance
from tests.training.samples import examples, shards
from tests.training.test_critic import LENGTHS, by_hand, critic

VOCAB = 128
LATER = ("deepseek_v2", "hunyuan_v1_dense", "hunyuan_v1_moe")


@pytest.mark.parametrize("family", ["qwen2_moe", "ministral3", "phi3", "glm4", "gpt_oss", "seed_oss", *LATER])
def test_scores_are_those_of_transformers_and_come_back_bit_equal(
    family: str, rank: Rank, bounds: Tolerance, tmp_path: Path
) -> None:
    torch.manual_seed(4)
    config = tiny_config(family, vocab_size=VOCAB, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    assert load_model_config(tmp_path / "model").head == "score"
    rank.build("critic", critic(tmp_path / "model"))
    made = examples(LENGTHS, VOCAB)
    [shard], _ = shards([made])
    with torch.no_grad():
        expected = torch.cat([by_hand(model, example) for example in made])
    assert expected.abs().max() > 0.1
    found = torch.tensor(rank.values("critic", shard)[0][0])
    torch.testing.assert_close(found, expected, atol=bounds.logprob, rtol=0)
    rank.export_hf("critic", tmp_path / "model", tmp_path / "hf")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "hf"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
