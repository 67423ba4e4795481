import pytest

from megarl.training.rank import Rank
from tests.support.tiny import write_tiny_qwen
from tests.training.harness import VOCAB, actor_spec


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    """A random HF model."""
    target = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_qwen(target, vocab_size=VOCAB)
    return target


@pytest.fixture(scope="module")
def rank():
    """One rank, which is all there is."""
    rank = Rank(0, 1, "cpu", seed=1)
    rank.rendezvous("127.0.0.1", rank.free_port(), timeout_s=30)
    yield rank
    rank.close()


@pytest.fixture
def spec(folder):
    return actor_spec(folder)
