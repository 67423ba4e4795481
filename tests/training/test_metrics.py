import pytest
import torch

from megarl.core.errors import MegarlError
from megarl.core.layout import Layout
from megarl.training.metrics import LossOutput, MetricSums

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture
def group(rank):
    """One process is a group too."""
    return rank.groups_of(Layout()).dp_cp


def output(num_tokens, loss, clipped, largest):
    return LossOutput(
        loss=torch.tensor(loss),
        num_tokens=torch.tensor(num_tokens),
        weighted={"loss": torch.tensor(loss)},
        sums={"clipped": torch.tensor(clipped)},
        maxima={"largest": torch.tensor(largest)},
    )


def add(sums, *outputs):
    """One mini-batch."""
    for each in outputs:
        sums.add(each)
    sums.end_mini_batch()


def test_means_and_maxima(group):
    sums = MetricSums()
    add(sums, output(3.0, 0.25, 1.0, 0.5), output(1.0, 0.5, 1.0, -2.0))
    add(sums, output(4.0, 1.0, 0.0, 0.1))
    assert sums.reduce(group) == {"loss": 1.75 / 2, "clipped": 2 / 8, "largest": 0.5}


def test_a_maximum_may_be_negative(group):
    sums = MetricSums()
    add(sums, output(1.0, 0.0, 0.0, -3.0), output(1.0, 0.0, 0.0, -2.0))
    assert sums.reduce(group)["largest"] == -2.0


def test_a_mini_batch_without_a_micro_batch_on_this_rank_counts(group):
    sums = MetricSums()
    add(sums, output(2.0, 0.5, 1.0, 0.0))
    add(sums)
    assert sums.reduce(group)["loss"] == 0.25


def test_of_no_trained_token_nothing_is_told(group):
    """An entropy of 0 stood there where all samples were masked."""
    sums = MetricSums()
    add(sums, output(0.0, 0.0, 0.0, 0.0))
    assert sums.reduce(group) == {"loss": 0.0}


def test_nothing_at_all_is_an_error(group):
    sums = MetricSums()
    add(sums)
    with pytest.raises(MegarlError, match="no micro-batch"):
        sums.reduce(group)
