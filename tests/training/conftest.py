import pytest
import torch
from transformers import AutoModelForSequenceClassification

from megarl.training.rank import Rank
from tests.support.tiny import write_tiny_qwen
from tests.training.harness import VOCAB, actor_spec


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    """A random HF model."""
    target = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_qwen(target, vocab_size=VOCAB)
    return target


@pytest.fixture(scope="package")
def scored(folder, tmp_path_factory):
    """The tiny model with a random score head, written by transformers."""
    target = tmp_path_factory.mktemp("scored") / "model"
    torch.manual_seed(4)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = 0
    model.save_pretrained(target)
    for path in folder.glob("token*"):
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.fixture(scope="module")
def rank(platform):
    """One rank, which is all there is."""
    rank = Rank(0, 1, platform.name, seed=1)
    rank.rendezvous("127.0.0.1", rank.free_port(), timeout_s=30)
    yield rank
    rank.close()


@pytest.fixture
def spec(folder):
    return actor_spec(folder)
